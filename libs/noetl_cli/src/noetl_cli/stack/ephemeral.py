"""A stack for one command: in a temporary directory, gone with it."""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from noetl_cli.failure import CommandFailed
from noetl_cli.stack.supervisor import Report, StackOptions, Supervisor, open_stack


@contextlib.asynccontextmanager
async def ephemeral_stack(
    report: Report, *, options: StackOptions | None = None
) -> AsyncIterator[Supervisor]:
    root = Path(tempfile.mkdtemp(prefix="noetl-"))
    chosen = options or StackOptions(data_dir=root, is_discarded=True)
    try:
        async with (
            open_stack(replace(chosen, data_dir=root), report) as supervisor,
            _while_there_is_hope(supervisor.hopeless),
        ):
            yield supervisor
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextlib.asynccontextmanager
async def _while_there_is_hope(hopeless: asyncio.Future[str]) -> AsyncIterator[None]:
    """Ends the block with a failure when a part of the stack will not come back."""
    task = asyncio.current_task()
    assert task is not None

    def cancel(_hopeless: asyncio.Future[str]) -> None:
        task.cancel()

    hopeless.add_done_callback(cancel)
    try:
        yield
    except asyncio.CancelledError:
        if not hopeless.done():
            raise
        task.uncancel()
        raise CommandFailed(hopeless.result()) from None
    finally:
        hopeless.remove_done_callback(cancel)
