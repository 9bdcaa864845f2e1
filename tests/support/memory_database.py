"""The tables of one shard in memory, for the real broker to run on.

`Database.commit` accepts and refuses what `noetl.commit_batch` does, and keeps JSON as `jsonb`
does. Inside `in_memory()` the broker's stores answer from a Database instead of Postgres.
"""

import bisect
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import MappingProxyType
from typing import Any, Literal, NoReturn, cast
from unittest.mock import patch

import asyncpg
import msgspec

from noetl_broker import advance
from noetl_broker.states import Playbooks
from noetl_core.domain.envelope import Envelope, Reference
from noetl_core.domain.events import CallDone, Event, LoopStarted
from noetl_core.domain.ids import (
    CatalogId,
    CommandId,
    EventId,
    ExecutionId,
    LoopId,
    StepName,
    WorkerId,
)
from noetl_core.domain.playbook import Playbook
from noetl_core.domain.state import ExecutionState
from noetl_core.store import batch as batches
from noetl_core.store import event as events
from noetl_core.store import snapshot
from noetl_core.store.batch import Batch, EndedRow
from noetl_core.store.event import event_of
from noetl_core.wire.messages import Message, Stored, encode_messages
from support.ledger import Ledger, roads_of

Key = tuple[ExecutionId, CommandId]
FORGER = WorkerId("nobody")
"""Reports commands that it does not hold."""
CommitFault = Literal["none", "refused", "answer lost", "late", "overtaken"]
"""How a commit goes: it never reaches the server; it is done, but the answer is lost; the server
has it and will come to it later; one that was late is done first."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_decode_state = msgspec.json.Decoder(ExecutionState).decode


class Row:
    """A command that is open, as `noetl.command` has it."""

    __slots__ = ("is_lapsed", "payload", "worker_id")

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.worker_id: WorkerId | None = None
        self.is_lapsed = False


class Database:
    """Plays the pool and the connection of the broker too."""

    def __init__(self, playbook: Playbook) -> None:
        self.playbook = playbook
        self.epoch = 0
        self.ledgers: dict[ExecutionId, Ledger] = {}
        self.log: list[Event] = []
        self.rows: dict[Key, Row] = {}
        self.vanished: set[Key] = set()
        """Open commands whose row somebody took away."""
        self.results: dict[tuple[ExecutionId, int], bytes] = {}
        self.parts: dict[tuple[ExecutionId, int, int], bytes] = {}
        self.totals: dict[tuple[ExecutionId, int], int] = {}
        self.inbox: dict[int, bytes] = {}
        self.snapshots: dict[ExecutionId, bytes] = {}
        self.watermark = EventId(0)
        self.refusals = 0
        self.fault: CommitFault = "none"
        """What will go wrong with the next commit."""
        self.late: list[Batch] = []
        """Commits that the server has, while the broker has lost its connection."""
        self._inbox_ids = 0
        self._roads = roads_of(playbook)

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator["Database"]:
        yield self

    @property
    def newest_event_id(self) -> int:
        return self.log[-1].event_id if self.log else 0

    def claim(self) -> int:
        self.epoch += 1
        return self.epoch

    def put_inbox(self, *messages: Message) -> None:
        self._inbox_ids += 1
        self.inbox[self._inbox_ids] = encode_messages(list(messages))

    def ledger(self, execution_id: ExecutionId) -> Ledger:
        if execution_id not in self.ledgers:
            self.ledgers[execution_id] = Ledger(execution_id, self._roads)
        return self.ledgers[execution_id]

    def events_after(self, event_id: int) -> list[Event]:
        return self.log[bisect.bisect_right(self.log, event_id, key=_event_id) :]

    def snapshot(self, execution_id: ExecutionId, state: ExecutionState) -> None:
        self.snapshots[execution_id] = _encode(_jsonb(_decode(_encode(state))))

    def state_of(self, execution_id: ExecutionId) -> ExecutionState:
        """The snapshot; before the first, the state of an execution that nobody has seen."""
        body = self.snapshots.get(execution_id)
        return ExecutionState(execution_id=execution_id) if body is None else _decode_state(body)

    def commit(self, batch: Batch) -> None:
        fault, self.fault = self.fault, "none"
        if fault == "overtaken":
            self.settle_late()
        if fault == "late":
            self.late.append(batch)
        elif fault != "refused":
            self._commit(batch)
        if fault in {"refused", "answer lost", "late"}:
            raise asyncpg.exceptions.ConnectionDoesNotExistError("connection was closed")

    def settle_late(self) -> None:
        """The server comes to what it still had to do; nobody hears the answer."""
        waiting, self.late = self.late, []
        for batch in waiting:
            try:
                self._commit(batch)
            except asyncpg.PostgresError:
                continue

    def _commit(self, batch: Batch) -> None:
        self._check(batch)
        started = self._append(batch)
        for ended in batch.ended:
            key = (ended.execution_id, ended.command_id)
            assert ended.worker_id != FORGER, f"a forgery counts: {ended}"
            self._close(key)
        for command in batch.commands:
            key = (command.execution_id, command.command_id)
            assert key not in self.rows, command
            self.rows[key] = Row(command.payload)
        for execution_id in batch.ended_executions:
            for key in [*self.rows, *self.vanished]:
                if key[0] == execution_id:
                    self._close(key)
        self._store(batch)
        for event, read in started:
            self._check_collection(event, read)
        for inbox_id in batch.inbox_ids:
            self.inbox.pop(inbox_id, None)
        self.refusals += len(batch.refusals)

    def _check(self, batch: Batch) -> None:
        """What `noetl.commit_batch` refuses, in its order."""
        assert not batch.dead_letters, batch.dead_letters
        if any(epoch != self.epoch for epoch in batch.fences.values()):
            _refuse("NS001", "a shard of this batch has another owner")
        keys = [(row.execution_id, row.event_key) for row in batch.events]
        assert len(set(keys)) == len(keys), ("one batch records a key twice", keys)
        for execution_id, event_key in keys:
            if event_key in self.ledger(ExecutionId(execution_id)).keys:
                raise asyncpg.UniqueViolationError(event_key)
        if any(self._is_held_by_another(ended) for ended in batch.ended):
            _refuse("NS002", "a command of this batch is held by another worker")

    def _is_held_by_another(self, ended: EndedRow) -> bool:
        row = self.rows.get((ended.execution_id, ended.command_id))
        if row is None or row.worker_id is None or ended.worker_id is None:
            return False
        return row.worker_id != ended.worker_id

    def _append(self, batch: Batch) -> list[tuple[Event, Envelope]]:
        """Record the events; of loops over a step's result, give back what they have read."""
        started = []
        for row in batch.events:
            event = event_of(_as_stored(row._asdict()))
            assert event.event_id > self.newest_event_id, f"{event} is behind the log"
            self.log.append(event)
            ledger = self.ledger(event.execution_id)
            ledger.record(event, row.event_key)
            read = self._read_by_loop(ledger, event)
            if read is not None:
                started.append((event, read))
        return started

    def _close(self, key: Key) -> None:
        self.rows.pop(key, None)
        self.vanished.discard(key)

    def _store(self, batch: Batch) -> None:
        for result in batch.results:
            body = result.inline or (result.physical_uri or "").encode()
            self.results[result.execution_id, result.ref_id] = body
        for part in batch.parts:
            assert part.inline is not None, part
            self.parts[part.execution_id, part.manifest_id, part.part_index] = part.inline
        for collection in batch.collections:
            key = (collection.execution_id, collection.manifest_id)
            self.totals[key] = collection.item_count

    def _read_by_loop(self, ledger: Ledger, event: Event) -> Envelope | None:
        if not isinstance(event.fact, LoopStarted):
            return None
        loop = self.playbook.steps[event.fact.step].loop
        assert loop is not None, event
        if not str(loop.collection).startswith("{{ s"):
            return None
        source = StepName(str(loop.collection)[3:].split(".", maxsplit=1)[0])
        return ledger.state.steps[source].result

    def _check_collection(self, event: Event, read: Envelope) -> None:
        """A loop over what a step returned gets all of it, the last item of a batch too."""
        reference = read.reference
        assert isinstance(event.fact, LoopStarted), event
        assert reference is not None, event
        if reference.type == "eventlog":
            expected = self.results_of_loop(event.execution_id, LoopId(reference.ref_id))
        else:
            expected = _decode(self.results[event.execution_id, reference.ref_id])["rows"]
        parts = [
            self.parts[event.execution_id, event.event_id, number]
            for number in range(event.fact.parts)
        ]
        assert [item for part in parts for item in _decode(part)] == expected, event

    def results_of_loop(self, execution_id: ExecutionId, loop_id: LoopId) -> list[Any]:
        results: list[Any] = [None] * self.totals.get((execution_id, loop_id), 0)
        for event in self.ledger(execution_id).events:
            fact = event.fact
            if isinstance(fact, CallDone) and fact.loop_id == loop_id:
                assert fact.iter_index is not None, fact
                results[fact.iter_index] = _decode(self.results[execution_id, event.event_id])
        return results

    def check(self) -> None:
        """Command rows are what the log says they are."""
        open_commands = {
            (execution_id, command_id)
            for execution_id, ledger in self.ledgers.items()
            for command_id in ledger.state.commands
        }
        assert open_commands == self.rows.keys() | self.vanished, (open_commands, self.rows)


def _event_id(event: Event) -> int:
    return event.event_id


def _refuse(sqlstate: str, message: str) -> NoReturn:
    error = asyncpg.PostgresError(message)
    vars(error)["sqlstate"] = sqlstate
    raise error


def _as_stored(row: dict[str, Any]) -> dict[str, Any]:
    for column in ("context", "result", "error"):
        if row[column] is not None:
            row[column] = _encode(_jsonb(_decode(row[column])))
    return row


def _jsonb(value: Any) -> Any:
    """jsonb sorts the keys of an object, the short ones first."""
    if isinstance(value, dict):
        names = sorted(value, key=_length_first) if len(value) > 1 else value
        return {name: _jsonb(value[name]) for name in names}
    if isinstance(value, list):
        return [_jsonb(item) for item in value]
    return value


def _length_first(name: str) -> tuple[int, str]:
    return len(name), name


class Results:
    """Plays the ResultStore: it has what is committed, and nothing else."""

    async def put(self, _execution_id: ExecutionId, _name: str, document: Any) -> Stored:
        return stored(document)

    async def get(self, conn: Database, execution_id: ExecutionId, reference: Reference) -> Any:
        return _decode(conn.results[execution_id, reference.ref_id])

    async def read_stored(self, _execution_id: ExecutionId, stored: Stored) -> Any:
        return _document(stored)

    async def results_of_loop(
        self,
        conn: Database,
        execution_id: ExecutionId,
        loop_id: LoopId,
        *,
        fresh: Mapping[int, Stored] = MappingProxyType({}),
    ) -> list[Any]:
        results = conn.results_of_loop(execution_id, loop_id)
        for index, stored in fresh.items():
            results[index] = _document(stored)
        return results

    async def part(
        self, conn: Database, execution_id: ExecutionId, loop_id: LoopId, part: int
    ) -> list[Any]:
        return cast("list[Any]", _decode(conn.parts[execution_id, loop_id, part]))


def stored(document: Any, *, is_large: bool = False) -> Stored:
    """A large one has its bytes in the name of its place: that is as good as a tier."""
    body = _encode(document)
    if is_large:
        return Stored(tier="pvc", size=len(body), sha256=b"", uri=body.decode())
    return Stored(tier="db", size=len(body), sha256=b"", inline=body)


def _document(stored: Stored) -> Any:
    return _decode(stored.inline or (stored.uri or "").encode())


@contextmanager
def in_memory() -> Iterator[None]:
    with (
        patch.object(advance, "log", _Log()),
        patch.object(batches, "commit", _commit),
        patch.object(batches, "holders", _holders),
        patch.object(snapshot, "read", _snapshots),
        patch.object(events, "read_tails", _tails),
        patch.object(Playbooks, "get", _playbook),
    ):
        yield


async def _commit(conn: Database, batch: Batch) -> None:
    conn.commit(batch)


async def _holders(conn: Database, keys: list[Key]) -> dict[Key, WorkerId | None]:
    return {key: conn.rows[key].worker_id for key in keys if key in conn.rows}


async def _snapshots(
    conn: Database, execution_ids: list[ExecutionId]
) -> dict[ExecutionId, ExecutionState]:
    return {e: conn.state_of(e) for e in execution_ids if e in conn.snapshots}


async def _tails(conn: Database, after: dict[ExecutionId, EventId]) -> list[Event]:
    return [
        event
        for event in conn.events_after(min(after.values()))
        if event.execution_id in after and event.event_id > after[event.execution_id]
    ]


async def _playbook(_playbooks: Playbooks, conn: Database, _catalog_id: CatalogId) -> Playbook:
    return conn.playbook


class _Log:
    """A broker lives on when an execution cannot; here that is the end of the case."""

    def info(self, _event: str, **_fields: object) -> None: ...

    def warning(self, event: str, **fields: object) -> None:
        raise AssertionError(f"{event} {fields}")

    def exception(self, _event: str, **_fields: object) -> None:
        raise  # noqa: PLE0704 - it is called while the exception is handled
