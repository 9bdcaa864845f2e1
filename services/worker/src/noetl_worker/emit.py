"""What this worker says to the brokers, on its way out: batched by shard, never lost.

Everything that is ready goes out at once; what becomes ready meanwhile goes out together. A
completion does not wait. A claim that stands alone waits up to CLAIM_WAIT_SECONDS, because a quick
command's completion can then ride in the same message.

The end of a command that has sent chunks ahead takes their road, noetl.inbox, and so arrives after
them; by NATS it would overtake them and be refused until it is repeated.

NATS away: the same body goes into noetl.inbox. Both away: nothing is lost, because a finished
command is held until its row is gone, and the heartbeat publishes it again.
"""

import asyncio
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import structlog

from noetl_core.bus.connection import Bus
from noetl_core.domain.errors import ToolError
from noetl_core.domain.ids import ShardId, WorkerId
from noetl_core.process.complaint import Complaint
from noetl_core.store import inbox
from noetl_core.store.command import CommandKey, Leased
from noetl_core.store.postgres import Pool, is_postgres_away
from noetl_core.wire.messages import BODY_BYTES_MAX, Claimed, Done, Failed, Parked
from noetl_core.wire.subjects import event_batch, inbox_wake
from noetl_worker.held import Finished, Held, HeldCommand
from noetl_worker.metrics import TALLY
from noetl_worker.safe_errors import as_text

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
    follows_chunks: bool = False


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
        self._complaint = Complaint()

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

    def finish(self, leased: Leased, message: Done | Failed | Parked) -> None:
        message, body = _packed(message)
        follows_chunks = isinstance(message, Done) and message.chunks > 0
        finished = Finished(leased.shard_id, msgspec.Raw(body), len(body), follows_chunks)
        self._held.finish(leased.key, finished)
        self._add(leased.shard_id, _note(finished, leased.key))
        _count(message)
        self._send_soon()

    def repeat(self, commands: Iterable[HeldCommand]) -> None:
        """Publish again what was published and not recorded."""
        for command in commands:
            if command.finished is not None:
                self._add(command.finished.shard_id, _note(command.finished, command.leased.key))
        self._send_soon()

    async def send_chunk(self, shard: ShardId, body: bytes) -> None:
        """By the inbox, and safe when this returns: nobody holds a chunk to say it again."""
        await inbox.put_durably(self._pool, shard, body)
        await self._bus.wake(inbox_wake(shard))

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
        try:
            await self._bring(shard, batch)
        except Exception:
            # Nobody waits for this task. The ends in it are said again as long as their rows are
            # there, so a bug here costs a heartbeat and must be heard of.
            log.exception("emit.failed", shard_id=shard, messages=len(batch))

    async def _bring(self, shard: ShardId, batch: list[_Note]) -> None:
        body = _encode([note.body for note in batch])
        by_inbox = len(body) > BODY_BYTES_MAX or any(note.follows_chunks for note in batch)
        if by_inbox or not await self._bus.publish(event_batch(shard), body):
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
            if self._complaint.failed():
                log.warning("emit.delayed", batches=self._complaint.failures, error=str(error))
            return
        self._complaint.recovered()
        TALLY.inbox_batches += 1
        await self._bus.wake(inbox_wake(shard))


def _packed(message: Done | Failed | Parked) -> tuple[Done | Failed | Parked, bytes]:
    """The message in bytes. One that no message can hold becomes one that says so: a command whose
    end cannot be said would be ours for ever."""
    try:
        return message, _encode(message)
    except Exception as error:
        log.exception("emit.not_packed", command_id=message.command_id)
        text = f"the end of the command cannot be sent: {type(error).__name__}: {error}"
        failed = Failed(
            execution_id=message.execution_id,
            command_id=message.command_id,
            worker_id=message.worker_id,
            error=ToolError(kind="internal", message=as_text(text)),
        )
        return failed, _encode(failed)


def _note(finished: Finished, ends: CommandKey) -> _Note:
    return _Note(finished.body, finished.size, ends, finished.follows_chunks)


def _count(message: Done | Failed | Parked) -> None:
    if isinstance(message, Parked):
        TALLY.parked += 1
        return
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
