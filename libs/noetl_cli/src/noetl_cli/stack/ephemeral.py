"""A stack for one command: in a temporary directory, gone with it."""

import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from noetl_cli.stack.supervisor import Report, StackOptions, Supervisor, open_stack


@contextlib.asynccontextmanager
async def ephemeral_stack(
    report: Report, *, options: StackOptions | None = None
) -> AsyncIterator[Supervisor]:
    root = Path(tempfile.mkdtemp(prefix="noetl-"))
    chosen = options or StackOptions(data_dir=root, is_discarded=True)
    try:
        async with open_stack(replace(chosen, data_dir=root), report) as supervisor:
            yield supervisor
    finally:
        shutil.rmtree(root, ignore_errors=True)
