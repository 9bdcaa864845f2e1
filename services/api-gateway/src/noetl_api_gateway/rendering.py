"""Templates of strangers, rendered in a child process that can be killed.

The sandbox bounds what a template may do, not how long it takes. In a worker that costs one
command; here it would stop every client. So a warm child renders, one template at a time, and a
template that takes longer than SECONDS_MAX takes its child with it.
"""

import asyncio
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from noetl_core.domain.errors import RejectedError, TemplateError
from noetl_core.wire.http import RenderRequest

SECONDS_MAX = 2.0
START_SECONDS_MAX = 20.0

HEADER = struct.Struct(">I")
"""Both ways: the length of a message, then the message as JSON."""


class Outcome(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the child answers: `value`, or why there is none."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    reason: str | None = None
    field: str = ""
    name: str | None = None


class Renderer:
    """Keeps one child ready. Made by `open_renderer`."""

    def __init__(self) -> None:
        self._child: Process | None = None
        self._turn = asyncio.Lock()

    async def render(self, asked: RenderRequest) -> Any:
        """The value, as JSON. Raises TemplateError; RejectedError for one that takes too long."""
        async with self._turn:
            try:
                outcome = await self._ask(msgspec.json.encode(asked))
            except (TimeoutError, OSError, asyncio.IncompleteReadError):
                await self.close()
                raise RejectedError(
                    f"the template took more than {SECONDS_MAX:g} s, or too much memory"
                ) from None
            except BaseException:
                # A request that was given up leaves an answer in the pipe that is nobody's.
                await self.close()
                raise
        if outcome.reason is not None:
            raise TemplateError(outcome.reason, step="", field=outcome.field, name=outcome.name)
        return outcome.value

    async def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            if child.returncode is None:
                child.kill()
            await child.wait()

    async def _ask(self, message: bytes) -> Outcome:
        child = await self._ready_child()
        async with asyncio.timeout(SECONDS_MAX):
            return await _exchange(child, message)

    async def _ready_child(self) -> Process:
        if self._child is None or self._child.returncode is not None:
            # No environment: whoever escapes from the sandbox finds no secret in it.
            self._child = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-m", "noetl_api_gateway.render_child",
                stdin=PIPE, stdout=PIPE, env={},
            )  # fmt: skip
            async with asyncio.timeout(START_SECONDS_MAX):
                await _exchange(self._child, msgspec.json.encode(RenderRequest(template="")))
        return self._child


async def _exchange(child: Process, message: bytes) -> Outcome:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(HEADER.pack(len(message)) + message)
    await child.stdin.drain()
    (length,) = HEADER.unpack(await child.stdout.readexactly(HEADER.size))
    return msgspec.json.decode(await child.stdout.readexactly(length), type=Outcome)


@asynccontextmanager
async def open_renderer() -> AsyncIterator[Renderer]:
    """The child is started by the first template, and ended with the block."""
    renderer = Renderer()
    try:
        yield renderer
    finally:
        await renderer.close()
