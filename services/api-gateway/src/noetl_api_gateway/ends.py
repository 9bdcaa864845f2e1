"""Waiting for executions to end: the projection tells, and one look at the database for everybody
who waits makes up for what it could not tell.
"""

import asyncio
from collections import Counter
from contextlib import suppress

import msgspec

from noetl_core.domain.ids import ExecutionId
from noetl_core.process.resilience import is_transient
from noetl_core.store import execution
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import decode_ids

LOOK_SECONDS = 0.1


class EndWatch:
    """While anybody waits, a task looks every LOOK_SECONDS which of their executions have ended."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._ended: dict[ExecutionId, asyncio.Event] = {}
        self._waiters: Counter[ExecutionId] = Counter()
        self._looking: asyncio.Task[None] | None = None
        self._is_closed = False

    async def wait(self, execution_id: ExecutionId, *, seconds: float) -> None:
        """Return when the execution has ended, the time is up, or there is no more waiting."""
        if self._is_closed:
            return
        ended = self._ended.setdefault(execution_id, asyncio.Event())
        self._waiters[execution_id] += 1
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_while_awaited())
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await ended.wait()
        finally:
            self._leave(execution_id)

    async def heard(self, body: bytes) -> None:
        """The projection says which executions can be read as ended."""
        with suppress(msgspec.DecodeError):
            self._tell(decode_ids(body))

    def release(self) -> None:
        """Send everybody home: the gateway stops."""
        self._is_closed = True
        self._tell(list(self._ended))

    async def _look_while_awaited(self) -> None:
        while self._ended:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                self._tell(await execution.ended_among(self._pool, list(self._ended)))
            except Exception as error:
                # Whoever waits reads the row next, and meets the same trouble with a proper answer.
                self._tell(list(self._ended))
                if not is_transient(error):
                    raise

    def _tell(self, execution_ids: list[ExecutionId]) -> None:
        for execution_id in execution_ids:
            ended = self._ended.pop(execution_id, None)
            if ended is not None:
                ended.set()

    def _leave(self, execution_id: ExecutionId) -> None:
        self._waiters[execution_id] -= 1
        if self._waiters[execution_id] <= 0:
            del self._waiters[execution_id]
            self._ended.pop(execution_id, None)
