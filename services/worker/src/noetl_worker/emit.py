"""What this worker says to the brokers, on its way out: batched by shard, never lost.

Everything that is ready goes out at once; what becomes ready meanwhile goes out together. A
completion does not wait. A claim that stands alone waits up to CLAIM_WAIT_SECONDS, because a quick
command's completion can then ride in the same message.

NATS away: the same body goes into noetl.inbox. Both away: nothing is lost, because a finished
command is held until its row is gone, and the heartbeat publishes it again.
"""

import asyncio
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import structlog

from noetl_core.bus.connection import Bus
from noetl_core.domain.ids import ShardId, WorkerId
from noetl_core.store import inbox
from noetl_core.store.command import CommandKey, Leased
from noetl_core.store.postgres import Pool, is_postgres_away
from noetl_core.wire.messages import BODY_BYTES_MAX, Claimed, Done, Failed
from noetl_core.wire.subjects import event_batch, inbox_wake
from noetl_worker.held import Finished, Held, HeldCommand
from noetl_worker.metrics import TALLY

CLAIM_WAIT_SECONDS = 0.02
FLUSHES_MAX = 4
"""Batches under way at the same time; what comes meanwhile waits for one of them to end."""

_encode = msgspec.msgpack.Encoder().encode

log = structlog.get_logger()


class _Note(NamedTuple):
    """One message and, if it ends a command, which."""

    body: msgspec.Raw
    size: int
    ends: CommandKey | None


class Outbox:
    def __init__(self, bus: Bus, pool: Pool, held: Held, worker_id: WorkerId) -> None:
        self._bus = bus
        self._pool = pool
        self._held = held
        self._worker_id = worker_id
        self._waiting: dict[ShardId, list[_Note]] = {}
        self._flushes: set[asyncio.Task[None]] = set()
        self._timer: asyncio.Handle | None = None
        self._is_due = False

    def claim(self, leased: Leased) -> None:
        message = Claimed(
            execution_id=leased.execution_id,
            command_id=leased.command_id,
            worker_id=self._worker_id,
        )
        body = _encode(message)
        self._add(leased.shard_id, _Note(msgspec.Raw(body), len(body), None))
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(CLAIM_WAIT_SECONDS, self._send)

    def finish(self, leased: Leased, message: Done | Failed) -> None:
        body = _encode(message)
        finished = Finished(leased.shard_id, msgspec.Raw(body), len(body))
        self._held.finish(leased.key, finished)
        self._add(leased.shard_id, _Note(finished.body, finished.size, leased.key))
        _count(message)
        self._send_soon()

    def repeat(self, commands: Iterable[HeldCommand]) -> None:
        """Publish again what was published and not recorded."""
        for command in commands:
            if command.finished is not None:
                shard, body, size = command.finished
                self._add(shard, _Note(body, size, command.leased.key))
        self._send_soon()

    async def flush(self) -> None:
        """Send everything and wait until it is out."""
        self._send()
        while self._flushes:
            await asyncio.gather(*self._flushes)

    def _add(self, shard: ShardId, note: _Note) -> None:
        self._waiting.setdefault(shard, []).append(note)

    def _send_soon(self) -> None:
        """At the end of this turn of the loop: commands that finish together travel together."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._is_due = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._waiting or len(self._flushes) >= FLUSHES_MAX:
            return
        waiting, self._waiting = self._waiting, {}
        task = asyncio.create_task(self._send_all(waiting), name="worker.flush")
        self._flushes.add(task)
        task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._flushes.discard(task)
        if self._waiting:
            self._send_soon()

    async def _send_all(self, waiting: dict[ShardId, list[_Note]]) -> None:
        bodies = [(shard, batch) for shard, notes in waiting.items() for batch in batches(notes)]
        if len(bodies) == 1:
            await self._send_one(*bodies[0])
        else:
            await asyncio.gather(*(self._send_one(shard, batch) for shard, batch in bodies))

    async def _send_one(self, shard: ShardId, batch: list[_Note]) -> None:
        body = _encode([note.body for note in batch])
        if len(body) > BODY_BYTES_MAX or not await self._bus.publish(event_batch(shard), body):
            await self._put_into_inbox(shard, body)
        else:
            TALLY.nats_batches += 1
        self._held.publish(note.ends for note in batch if note.ends is not None)

    async def _put_into_inbox(self, shard: ShardId, body: bytes) -> None:
        try:
            await inbox.put(self._pool, shard, body)
        except Exception as error:
            if not is_postgres_away(error):
                raise
            log.warning("emit.delayed", shard_id=shard, error=str(error))
            return
        TALLY.inbox_batches += 1
        await self._bus.wake(inbox_wake(shard))


def _count(message: Done | Failed) -> None:
    TALLY.busy_ms += message.duration_ms
    if isinstance(message, Done):
        TALLY.done += 1
    else:
        TALLY.failed += 1


def batches(notes: list[_Note]) -> Iterator[list[_Note]]:
    """Pieces that fit into a message; a note that is larger than that goes alone."""
    batch: list[_Note] = []
    size = 0
    for note in notes:
        if batch and size + note.size > BODY_BYTES_MAX - 8:
            yield batch
            batch, size = [], 0
        batch.append(note)
        size += note.size
    if batch:
        yield batch
