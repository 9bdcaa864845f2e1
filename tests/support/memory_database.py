"""The tables of one shard in memory, for the real broker to run on.

`Database.commit` accepts and refuses what `noetl.commit_batch` does, and keeps JSON as `jsonb`
does. Inside `in_memory()` the broker's stores answer from a Database instead of Postgres.
"""

import bisect
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import MappingProxyType
from typing import Any, Literal, NoReturn, cast
from unittest.mock import patch

import asyncpg
import msgspec
from msgspec.structs import replace

from noetl_broker import advance, refuse
from noetl_broker.states import Playbooks
from noetl_core.blob import Resolved
from noetl_core.domain.envelope import Envelope, Reference
from noetl_core.domain.errors import NotFoundError
from noetl_core.domain.events import (
    CallDone,
    CallFailed,
    CommandExpired,
    Event,
    LoopStarted,
    RetryCompleted,
    StepExited,
    StepFailed,
)
from noetl_core.domain.ids import (
    CatalogId,
    CommandId,
    EventId,
    ExecutionId,
    LoopId,
    ShardId,
    StepName,
    WorkerId,
    parse_command_id,
    visit_id,
)
from noetl_core.domain.pages import PageRule, collected
from noetl_core.domain.playbook import Playbook
from noetl_core.domain.state import ExecutionState
from noetl_core.store import batch as batches
from noetl_core.store import event as events
from noetl_core.store import holder, snapshot
from noetl_core.store.batch import Batch, EndedRow, ManifestRow, PartRow
from noetl_core.store.event import event_of, event_row
from noetl_core.wire.messages import Message, Stored, encode_messages
from support.ledger import Ledger
from support.playbooks import Plan

Key = tuple[ExecutionId, CommandId]
TimerKey = tuple[ExecutionId, str]
SHARD = ShardId(0)
EVENTS_FROM = 1000
"""Ids of events are above: an execution with an id below was started by somebody, one with an id
above is a child."""
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

    __slots__ = ("is_given_back", "is_held", "is_lapsed", "payload", "worker_id")

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.worker_id: WorkerId | None = None
        self.is_lapsed = False
        self.is_given_back = False
        """Its worker let go of it by itself."""
        self.is_held = False
        """Its execution is paused: no worker may take it."""


class Database:
    """Plays the pool and the connection of the broker too."""

    def __init__(self, catalog: dict[CatalogId, Plan]) -> None:
        self.catalog = catalog
        self.epoch = 0
        self.ledgers: dict[ExecutionId, Ledger] = {}
        self.log: list[Event] = []
        self.rows: dict[Key, Row] = {}
        self.vanished: set[Key] = set()
        """Open commands whose row somebody took away."""
        self.results: dict[tuple[ExecutionId, int], bytes] = {}
        self.parts: dict[tuple[ExecutionId, int, int], bytes] = {}
        self.pages: dict[tuple[ExecutionId, int, int], int] = {}
        """By sequence and index: the result that is this page."""
        self.manifests: dict[tuple[ExecutionId, int], ManifestRow] = {}
        self.timers: set[TimerKey] = set()
        self.timers_of_old: list[TimerKey] = []
        """Everyone that ever was: the reaper may have seen it and say so much later."""
        self.inbox: dict[int, bytes] = {}
        self.snapshots: dict[ExecutionId, bytes] = {}
        self.watermark = EventId(0)
        self.refusals = 0
        self.fault: CommitFault = "none"
        """What will go wrong with the next commit."""
        self.late: list[Batch] = []
        """Commits that the server has, while the broker has lost its connection."""
        self._inbox_ids = 0

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator["Database"]:
        yield self

    @property
    def newest_event_id(self) -> int:
        return self.log[-1].event_id if self.log else EVENTS_FROM

    def claim(self) -> int:
        self.epoch += 1
        return self.epoch

    def put_inbox(self, *messages: Message) -> None:
        self._put_inbox(encode_messages(list(messages)))

    def _put_inbox(self, body: bytes) -> None:
        self._inbox_ids += 1
        self.inbox[self._inbox_ids] = body

    def ledger(self, execution_id: ExecutionId) -> Ledger:
        if execution_id not in self.ledgers:
            self.ledgers[execution_id] = Ledger(execution_id, self.catalog)
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
        self._check_timeouts(batch)
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
        self._change_timers(batch)
        self._hold_or_let_go(batch)
        for outgoing in batch.outgoing:
            self._put_inbox(outgoing.body)
        self.refusals += len(batch.refusals)

    def _change_timers(self, batch: Batch) -> None:
        for fired in batch.timers_fired:
            self.timers.discard((fired.execution_id, fired.timer))
        for timer in batch.timers:
            assert (timer.delay_s is None) != (timer.until_ms is None), timer
            key = (timer.execution_id, timer.timer)
            self.timers.add(key)
            self.timers_of_old.append(key)
        self.timers = {key for key in self.timers if key[0] not in batch.untimed}

    def _hold_or_let_go(self, batch: Batch) -> None:
        for key, row in self.rows.items():
            if key[0] in batch.is_held and row.worker_id is None:
                row.is_held = batch.is_held[key[0]]

    def _check_timeouts(self, batch: Batch) -> None:
        """Time is over for an execution only if it had a limit, and has it still."""
        for row in batch.events:
            is_timeout = b'"timeout"' in (row.error or "").encode()
            if row.event_type == "execution.failed" and row.node_name is None and is_timeout:
                own = [timer for e, timer in self.timers if e == row.execution_id]
                assert any(timer.startswith("execution") for timer in own), (row, own)

    def _check(self, batch: Batch) -> None:
        """What `noetl.commit_batch` refuses, in its order."""
        # A command that is lost too often is set aside for somebody to look at; it ended, too.
        for letter in batch.dead_letters:
            is_unknown = letter.reason.startswith("NotFoundError")
            assert is_unknown or letter.source == "command", letter
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
            self._check_returned(ledger, event)
            read = self._read_by_loop(ledger, event)
            if read is not None:
                started.append((event, read))
        return started

    def _check_returned(self, ledger: Ledger, event: Event) -> None:
        """A child gives back what its parent wanted of it."""
        fact = event.fact
        child = ledger.child_of(fact.command_id) if isinstance(fact, CallDone) else None
        if child is None or not isinstance(fact, CallDone):
            return
        state = self.ledgers[child].state
        if state.generation:
            return  # it was retried since then
        assert state.status == "COMPLETED", (fact, state)
        facts = [past.fact for past in self.ledgers[child].events]
        ends = [past for past in facts if isinstance(past, StepExited | StepFailed)]
        result = ends[-1].result
        if state.return_step is not None:
            result = [end for end in ends if end.step == state.return_step][-1].result
        expected = result.reference
        if expected is not None:
            expected = replace(expected, execution_id=expected.execution_id or child)
        assert fact.result.reference == expected, (fact, expected)

    def _close(self, key: Key) -> None:
        self.rows.pop(key, None)
        self.vanished.discard(key)

    def _store(self, batch: Batch) -> None:
        for result in batch.results:
            body = result.inline or (result.physical_uri or "").encode()
            assert (result.execution_id, result.ref_id) not in self.results, result
            self.results[result.execution_id, result.ref_id] = body
        for part in batch.parts:
            self._store_part(part)
        for manifest in batch.manifests:
            key = (manifest.execution_id, manifest.manifest_id)
            assert key not in self.manifests, manifest
            self.manifests[key] = manifest
            if manifest.kind == "pages":
                self._check_pages(key, EventId(manifest.manifest_id))

    def _store_part(self, part: PartRow) -> None:
        key = (part.execution_id, part.manifest_id, part.part_index)
        assert key not in self.parts.keys() | self.pages.keys(), part
        assert (part.store_tier == "result") == (part.ref_id is not None), part
        if part.ref_id is not None:
            self.pages[key] = part.ref_id
        else:
            assert part.inline is not None, part
            self.parts[key] = part.inline

    def _check_pages(self, key: tuple[ExecutionId, int], sequence: EventId) -> None:
        """The list of pages has all of them, each once: those that the log says were called."""
        called = {}
        for event in self.ledger(key[0]).events:
            fact = event.fact
            if isinstance(fact, CallDone) and sequence in {fact.sequence, event.event_id}:
                called[parse_command_id(fact.command_id).page - 1] = event.event_id
        listed = {place[2]: ref for place, ref in self.pages.items() if place[:2] == key}
        assert listed == called, (listed, called)
        assert sorted(listed) == list(range(self.manifests[key].part_count)), listed

    def _read_by_loop(self, ledger: Ledger, event: Event) -> Envelope | None:
        fact = event.fact
        if not isinstance(fact, LoopStarted) or fact.is_cursor or fact.base is not None:
            return None
        loop = ledger.plan.playbook.steps[fact.step].loop
        assert loop is not None, event
        if not str(loop.collection).startswith("{{ s"):
            return None
        source = StepName(str(loop.collection)[3:].split(".", maxsplit=1)[0])
        chunk = ledger.state.visits[visit_id(fact.step, fact.visit)].chunk
        if chunk is not None and chunk.step == source:
            return chunk.result
        return ledger.state.steps[source].result

    def _check_collection(self, event: Event, read: Envelope) -> None:
        """A loop over what a step returned gets all of it, the last item of a batch too."""
        fact, reference = event.fact, read.reference
        assert isinstance(fact, LoopStarted), event
        assert reference is not None, event
        expected = self.document(event.execution_id, reference)
        if isinstance(expected, dict):
            expected = expected["rows"]
        loop = self.ledger(event.execution_id).plan.playbook.steps[fact.step].loop
        assert loop is not None, event
        if loop.spec.chunk_size is not None:
            size = loop.spec.chunk_size
            expected = [expected[n : n + size] for n in range(0, len(expected), size)]
        assert self.collection(event.execution_id, LoopId(event.event_id)) == expected, event

    def collection(self, execution_id: ExecutionId, loop_id: LoopId) -> list[Any]:
        """The items of a loop, or the indexes that it lists."""
        count = self.manifests[execution_id, loop_id].part_count
        parts = [self.parts[execution_id, loop_id, number] for number in range(count)]
        return [item for part in parts for item in _decode(part)]

    def document(self, execution_id: ExecutionId, reference: Reference) -> Any:
        owner = reference.execution_id or execution_id
        if reference.type == "eventlog":
            return self.results_of_loop(owner, LoopId(reference.ref_id))
        if reference.type == "pages":
            sequence = EventId(reference.ref_id)
            return collected(self.page_rule(owner, sequence), self.pages_of(owner, sequence))
        return _decode(self.results[owner, reference.ref_id])

    def page_rule(self, execution_id: ExecutionId, sequence: EventId) -> PageRule:
        meta = _decode(self.manifests[execution_id, sequence].meta or "{}")
        return PageRule(meta["collect"], meta["merge_path"])

    def pages_of(
        self,
        execution_id: ExecutionId,
        sequence: EventId,
        fresh: Mapping[int, Any] = MappingProxyType({}),
    ) -> list[Any]:
        found = {
            index: _decode(self.results[execution_id, ref_id])
            for (owner, manifest_id, index), ref_id in self.pages.items()
            if (owner, manifest_id) == (execution_id, sequence)
        } | dict(fresh)
        row = self.manifests.get((execution_id, sequence))
        count = max((index + 1 for index in found), default=0) if row is None else row.part_count
        return [found.get(index) for index in range(count)]

    def results_of_loop(
        self,
        execution_id: ExecutionId,
        loop_id: LoopId,
        *,
        fresh: Mapping[int, Any] = MappingProxyType({}),
        base: LoopId | None = None,
    ) -> list[Any]:
        values: dict[int, Any] = {}
        for index, event in self._ends(execution_id, loop_id, base).items():
            fact = event.fact
            if not isinstance(fact, CallDone | RetryCompleted):
                values[index] = None
            elif self._is_value(event):
                reference = fact.result.reference
                values[index] = reference and self.document(execution_id, reference)
        values |= fresh
        row = self.manifests.get((execution_id, loop_id if base is None else base))
        if row is None:
            return [values[index] for index in sorted(values)]
        return [values.get(index) for index in range(row.item_count)]

    def undone_of_loop(self, execution_id: ExecutionId, loop_id: LoopId) -> list[int]:
        row = self.manifests.get((execution_id, loop_id))
        ends = self._ends(execution_id, loop_id)
        done = {i for i, event in ends.items() if isinstance(event.fact, CallDone | RetryCompleted)}
        return [index for index in range(row.item_count if row else 0) if index not in done]

    def _is_value(self, event: Event) -> bool:
        """A frame of a cursor that claimed nothing gives no value."""
        fact = event.fact
        if not isinstance(fact, CallDone) or (event.execution_id, fact.loop_id) in self.manifests:
            return True
        return bool(fact.frame_rows)

    def _ends(
        self, execution_id: ExecutionId, loop_id: LoopId, base: LoopId | None = None
    ) -> dict[int, Event]:
        """How each item that has ended did so, in whichever activation of the loop."""
        loop_ids = {loop_id, *self._activations(execution_id, base or loop_id)}
        ends: dict[int, Event] = {}
        for event in self.ledger(execution_id).events:
            fact = event.fact
            if not isinstance(fact, CallDone | CallFailed | CommandExpired | RetryCompleted):
                continue
            if fact.loop_id not in loop_ids or fact.iter_index is None:
                continue
            if isinstance(fact, RetryCompleted) or fact.again is None:
                ends[fact.iter_index] = event
        return ends

    def _activations(self, execution_id: ExecutionId, loop_id: LoopId) -> Iterator[LoopId]:
        yield loop_id
        row = self.manifests.get((execution_id, loop_id))
        base = None if row is None or row.meta is None else _decode(row.meta).get("base")
        if base is not None:
            yield from self._activations(execution_id, LoopId(int(base)))

    def check(self) -> None:
        """Rows of commands and timers are what the log says they are."""
        open_commands = {
            (execution_id, command_id)
            for execution_id, ledger in self.ledgers.items()
            for command_id, command in ledger.state.commands.items()
            if command.parked is None
        }
        assert open_commands == self.rows.keys() | self.vanished, (open_commands, self.rows)
        for key, row in self.rows.items():
            is_paused = self.ledgers[key[0]].state.status == "PAUSED"
            assert row.worker_id is not None or row.is_held == is_paused, (key, is_paused)
        for execution_id, timer in self.timers:
            assert self.ledgers[execution_id].state.is_open, (execution_id, timer)
        for execution_id, ledger in self.ledgers.items():
            missing = ledger.timers() - {t for e, t in self.timers if e == execution_id}
            assert not missing, (execution_id, missing)


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
        return conn.document(execution_id, reference)

    async def read_stored(self, _execution_id: ExecutionId, stored: Stored) -> Any:
        return _document(stored)

    async def results_of_loop(
        self,
        conn: Database,
        execution_id: ExecutionId,
        loop_id: LoopId,
        *,
        fresh: Mapping[int, Stored | Resolved] = MappingProxyType({}),
        base: LoopId | None = None,
    ) -> list[Any]:
        values = {index: _document(item) for index, item in fresh.items()}
        return conn.results_of_loop(execution_id, loop_id, fresh=values, base=base)

    async def undone_of_loop(
        self, conn: Database, execution_id: ExecutionId, loop_id: LoopId
    ) -> list[int]:
        return conn.undone_of_loop(execution_id, loop_id)

    async def pages(
        self,
        conn: Database,
        execution_id: ExecutionId,
        sequence: EventId,
        *,
        fresh: Mapping[int, Stored] = MappingProxyType({}),
        rule: tuple[str, str] | None = None,
    ) -> Any:
        documents = {index: _document(stored) for index, stored in fresh.items()}
        known = conn.page_rule(execution_id, sequence) if rule is None else PageRule(*rule)
        return collected(known, conn.pages_of(execution_id, sequence, documents))

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


def _document(stored: Stored | Resolved) -> Any:
    if isinstance(stored, Resolved):
        return stored.document
    return _decode(stored.inline or (stored.uri or "").encode())


@contextmanager
def in_memory() -> Iterator[None]:
    with (
        patch.object(advance, "log", _Log()),
        patch.object(refuse, "log", _Log()),
        patch.object(batches, "commit", _commit),
        patch.object(holder, "holders", _holders),
        patch.object(holder, "standings", _standings),
        patch.object(holder, "ended_by_others", _ended_by_others),
        patch.object(snapshot, "read", _snapshots),
        patch.object(events, "read_tails", _tails),
        patch.object(Playbooks, "get", _playbook),
    ):
        yield


async def _commit(conn: Database, batch: Batch) -> set[ShardId]:
    conn.commit(batch)
    return {SHARD} if batch.outgoing else set()


async def _holders(conn: Database, keys: list[Key]) -> dict[Key, WorkerId | None]:
    return {key: conn.rows[key].worker_id for key in keys if key in conn.rows}


async def _standings(conn: Database, keys: list[Key]) -> dict[Key, holder.Standing]:
    rows = {key: conn.rows[key] for key in keys if key in conn.rows}
    return {
        key: holder.Standing(row.is_lapsed, row.worker_id if row.is_given_back else None)
        for key, row in rows.items()
    }


async def _ended_by_others(_conn: Database, _ends: Any) -> list[Any]:
    return []  # only the audit wants to know


async def _snapshots(
    conn: Database, execution_ids: list[ExecutionId]
) -> dict[ExecutionId, ExecutionState]:
    return {e: conn.state_of(e) for e in execution_ids if e in conn.snapshots}


async def _tails(
    conn: Database, after: dict[ExecutionId, EventId], *, limit: int
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    counts: Counter[ExecutionId] = Counter()
    for event in conn.events_after(min(after.values())):
        execution_id = event.execution_id
        if execution_id in after and event.event_id > after[execution_id]:
            counts[execution_id] += 1
            if counts[execution_id] <= limit:
                row = event_row(event, shard_id=SHARD, epoch_id=None)
                found.append(row._asdict())
    return found


async def _playbook(_playbooks: Playbooks, conn: Database, catalog_id: CatalogId) -> Playbook:
    if catalog_id not in conn.catalog:
        raise NotFoundError(f"the catalog has no playbook {catalog_id}")
    return conn.catalog[catalog_id].playbook


class _Log:
    """A broker lives on when an execution cannot; here that is the end of the case."""

    def info(self, _event: str, **_fields: object) -> None: ...

    def warning(self, event: str, **fields: object) -> None:
        raise AssertionError(f"{event} {fields}")

    def exception(self, _event: str, **_fields: object) -> None:
        if not isinstance(sys.exc_info()[1], NotFoundError):
            raise  # noqa: PLE0704 - it is called while the exception is handled
