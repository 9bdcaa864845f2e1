"""Facts into rows: what follows from a new fact, and the rows beside the log that go with it."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from noetl_broker.family import on_end, on_pause
from noetl_broker.states import Live, Playbooks
from noetl_broker.turn import Turn
from noetl_core.blob.result_store import ResultStore
from noetl_core.domain.brief import brief_for, encode_brief
from noetl_core.domain.decide import Recorded, follow
from noetl_core.domain.envelope import Envelope, Reference
from noetl_core.domain.errors import ReferenceNeeded
from noetl_core.domain.events import (
    AnyFact,
    CallDone,
    CallFailed,
    CommandExpired,
    CommandIssued,
    CommandParked,
    Event,
    ExecutionCancelled,
    ExecutionCompleted,
    ExecutionFailed,
    ExecutionPaused,
    ExecutionResumed,
    ExecutionStarted,
    LoopStarted,
    RetryCompleted,
    StepAborted,
    StepEntered,
)
from noetl_core.domain.ids import (
    CommandId,
    EpochId,
    EventId,
    ExecutionId,
    LoopId,
    RefId,
    ShardId,
    parse_command_id,
)
from noetl_core.domain.loop import split
from noetl_core.domain.playbook import Playbook
from noetl_core.domain.timers import EXECUTION_TIMER, is_timed_by_broker, step_timer, wait_timer
from noetl_core.domain.tools import PARKED_KINDS
from noetl_core.store.batch import (
    CommandRow,
    EndedRow,
    ExpiryRow,
    ManifestRow,
    PartRow,
    ResultRow,
    TimerRow,
)
from noetl_core.store.event import EventRow, event_row
from noetl_core.wire.messages import Stored


class Recorder:
    def __init__(self, results: ResultStore, mint: Callable[[], int]) -> None:
        self._results = results
        self._playbooks = Playbooks()
        self._ids: Iterator[int] = iter(mint, None)
        self.epochs: dict[ShardId, EpochId] = {}
        """The epoch that was closed last on each shard; events carry it."""

    async def record(
        self,
        turn: Turn,
        shard: ShardId,
        live: Live,
        fact: AnyFact,
        *,
        event_id: EventId | None = None,
        stored: Stored | None = None,
    ) -> None:
        """Everything that follows from a new fact goes into the batch, in order."""
        turn.touched[live.state.execution_id] = shard
        turn.fence(shard)
        catalog_id = (
            fact.catalog_id if isinstance(fact, ExecutionStarted) else live.state.catalog_id
        )
        playbook = await self._playbooks.get(turn.conn, catalog_id)
        ids = self._ids if event_id is None else itertools.chain((event_id,), self._ids)
        for item in follow(playbook, live.state, fact, live.known, ids):
            if isinstance(item, ReferenceNeeded):
                await self._load(turn, live, item)
            else:
                self.append(turn, shard, item.event)
                await self._write(turn, shard, playbook, live, item)
                if stored is not None:
                    _write_result(turn, item.event, stored)
                    stored = None

    def append(self, turn: Turn, shard: ShardId, event: Event) -> None:
        epoch = self.epochs.get(shard)
        turn.batch.events.append(event_row(event, shard_id=shard, epoch_id=epoch))

    async def _write(  # noqa: C901, PLR0912 - one case an event
        self, turn: Turn, shard: ShardId, playbook: Playbook, live: Live, item: Recorded
    ) -> None:
        """The rows beside the log that go with an event."""
        execution_id, batch = item.event.execution_id, turn.batch
        match item.event.fact:
            case CommandIssued() as fact:
                row = await self._command_row(turn, shard, playbook, live, fact)
                batch.commands.append(row)
                if live.state.status == "PAUSED":
                    batch.is_held[execution_id] = True
                elif not fact.delay_s:
                    turn.work[shard, fact.pool] += 1
            case CallDone() as fact:
                batch.ended.append(EndedRow(execution_id, fact.command_id, fact.worker_id))
                if playbook.steps[fact.step].retry.on_success is not None:
                    _list_page(turn, item.event, fact)
            case CallFailed() as fact:
                batch.ended.append(EndedRow(execution_id, fact.command_id, fact.worker_id))
                on_end(turn, live.state, item.event)
            case CommandExpired() as fact:
                batch.ended.append(EndedRow(execution_id, fact.command_id, None))
            case CommandParked() as fact:
                batch.ended.append(EndedRow(execution_id, fact.command_id, fact.worker_id))
                if fact.until_ms is not None:
                    timer = wait_timer(fact.command_id)
                    batch.timers.append(TimerRow(execution_id, timer, until_ms=fact.until_ms))
            case StepEntered() as fact:
                step = playbook.steps[fact.step]
                if is_timed_by_broker(step):
                    timer = step_timer(fact.step, fact.visit)
                    batch.timers.append(TimerRow(execution_id, timer, delay_s=step.spec.timeout_s))
            case StepAborted() as fact:
                batch.ended += [EndedRow(execution_id, c, None) for c in fact.commands]
                on_end(turn, live.state, item.event)
            case LoopStarted() as fact if not fact.is_cursor:
                await self._store_collection(turn, live, item, fact)
            case RetryCompleted() as fact:
                batch.manifests.append(_pages_manifest(execution_id, fact))
            case ExecutionStarted():
                timeout_s = playbook.executor.spec.timeout_s
                if timeout_s is not None:
                    timer = EXECUTION_TIMER
                    batch.timers.append(TimerRow(execution_id, timer, delay_s=timeout_s))
            case ExecutionPaused() | ExecutionResumed():
                on_pause(turn, live.state)
            case ExecutionFailed() | ExecutionCancelled() | ExecutionCompleted() as fact:
                if not isinstance(fact, ExecutionCompleted):
                    batch.ended_executions.append(execution_id)
                turn.ended_on.add(shard)
                batch.untimed |= {execution_id} if _may_have_timers(playbook) else set()
                on_end(turn, live.state, item.event)
            case _:
                pass

    async def _command_row(
        self, turn: Turn, shard: ShardId, playbook: Playbook, live: Live, fact: CommandIssued
    ) -> CommandRow:
        while True:
            try:
                brief = brief_for(playbook, live.state, fact, live.known)
                break
            except ReferenceNeeded as needed:
                await self._load(turn, live, needed)
        return CommandRow(
            live.state.execution_id,
            fact.command_id,
            shard,
            fact.step,
            fact.attempt,
            fact.pool,
            fact.priority,
            fact.delay_s,
            encode_brief(brief),
        )

    async def _store_collection(
        self, turn: Turn, live: Live, item: Recorded, fact: LoopStarted
    ) -> None:
        assert item.collection is not None, fact
        execution_id, loop_id = item.event.execution_id, LoopId(item.event.event_id)
        meta = None if fact.base is None else _json({"base": str(fact.base)})
        total = fact.base_done + fact.total
        turn.batch.manifests.append(
            ManifestRow(execution_id, loop_id, "collection", fact.step, total, fact.parts, meta)
        )
        for number, part in enumerate(split(item.collection, fact.part_size)):
            name = CommandId(f"{fact.step}.{fact.visit}/collection.{number}")
            stored = await self._results.put(execution_id, name, part)
            turn.batch.parts.append(
                PartRow(
                    execution_id,
                    loop_id,
                    number,
                    len(part),
                    stored.tier,
                    stored.uri,
                    stored.size,
                    stored.sha256,
                    stored.inline,
                )
            )
            live.known.parts[loop_id, number] = part

    async def _load(self, turn: Turn, live: Live, needed: ReferenceNeeded) -> None:
        execution_id, known = live.state.execution_id, live.known
        if needed.reference is not None:
            await self._load_reference(turn, live, needed.reference)
        elif needed.part is not None:
            assert needed.loop_id is not None, needed
            key = (needed.loop_id, needed.part)
            known.parts[key] = await self._results.part(turn.conn, execution_id, *key)
        else:
            assert needed.loop_id is not None, needed
            known.undone[needed.loop_id] = await self._results.undone_of_loop(
                turn.conn, execution_id, needed.loop_id
            )

    async def _load_reference(self, turn: Turn, live: Live, reference: Reference) -> None:
        execution_id, known = live.state.execution_id, live.known
        if reference.type == "eventlog":
            loop_id = LoopId(reference.ref_id)
            known.loops[loop_id] = (
                await self._results.get(turn.conn, execution_id, reference)
                if reference.execution_id is not None
                else await self._loop_results(turn, live, loop_id)
            )
        else:
            known.results[reference.ref_id] = await self._document(turn, live, reference)

    async def _loop_results(self, turn: Turn, live: Live, loop_id: LoopId) -> list[Any]:
        """The last iterations of a loop are recorded in the turn that ends it."""
        execution_id = live.state.execution_id
        rows = [
            row
            for row in turn.batch.events
            if row.execution_id == execution_id and row.loop_id == loop_id
        ]
        found = await self._results.results_of_loop(
            turn.conn, execution_id, loop_id, fresh=_fresh_iterations(live, rows)
        )
        for row in rows:
            reference = _far_reference(row)
            if reference is not None and row.iter_index is not None:
                value = await self._document(turn, live, reference)
                found += [None] * (row.iter_index + 1 - len(found))
                found[row.iter_index] = value
        return found

    async def _document(self, turn: Turn, live: Live, reference: Reference) -> Any:
        """A result that came with a message of this turn is not in the database yet."""
        execution_id = live.state.execution_id
        stored = live.fresh.get(reference.ref_id)
        if reference.type == "pages" and reference.execution_id is None:
            return await self._pages(turn, live, EventId(reference.ref_id))
        if stored is not None:
            return await self._results.read_stored(execution_id, stored)
        return await self._results.get(turn.conn, execution_id, reference)

    async def _pages(self, turn: Turn, live: Live, sequence: EventId) -> Any:
        execution_id = live.state.execution_id
        listed = [row for row in turn.batch.parts if row.manifest_id == sequence]
        fresh = {
            row.part_index: live.fresh[RefId(row.ref_id)]
            for row in listed
            if row.ref_id is not None and RefId(row.ref_id) in live.fresh
        }
        own = [m for m in turn.batch.manifests if m.manifest_id == sequence]
        rule = msgspec.json.decode(own[0].meta or "{}") if own else None
        return await self._results.pages(
            turn.conn,
            execution_id,
            sequence,
            fresh=fresh,
            rule=None if rule is None else (rule["collect"], rule["merge_path"]),
        )


def _fresh_iterations(live: Live, rows: list[EventRow]) -> dict[int, Stored]:
    return {
        row.iter_index: live.fresh[RefId(EventId(row.event_id))]
        for row in rows
        if row.iter_index is not None
        and row.event_id in live.fresh
        and row.event_type in {"call.done", "loop.shard.done"}
    }


def _far_reference(row: EventRow) -> Reference | None:
    """Where an iteration's result is not a payload of its own: pages, or a child's."""
    if row.result is None or row.event_type not in _ENDS_ITERATION:
        return None
    reference = msgspec.json.decode(row.result, type=Envelope).reference
    if reference is None or (reference.type != "pages" and reference.execution_id is None):
        return None
    return reference


_ENDS_ITERATION = frozenset({"call.done", "loop.shard.done", "retry.completed"})


def _list_page(turn: Turn, event: Event, fact: CallDone) -> None:
    """A page is a result of its own; the manifest of its sequence only lists it."""
    if fact.result.reference is None:
        return
    turn.batch.parts.append(
        PartRow(
            event.execution_id,
            fact.sequence or event.event_id,
            parse_command_id(fact.command_id).page - 1,
            1,
            "result",
            None,
            fact.result.reference.bytes,
            None,
            None,
            event.event_id,
        )
    )


def _pages_manifest(execution_id: ExecutionId, fact: RetryCompleted) -> ManifestRow:
    meta = _json({"collect": fact.collect, "merge_path": fact.merge_path})
    return ManifestRow(
        execution_id, fact.sequence, "pages", fact.step, fact.pages, fact.pages, meta
    )


def _may_have_timers(playbook: Playbook) -> bool:
    steps = playbook.steps.values()
    return playbook.executor.spec.timeout_s is not None or any(
        is_timed_by_broker(step) or any(t.kind in PARKED_KINDS for t in step.tool) for step in steps
    )


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _write_result(turn: Turn, event: Event, stored: Stored) -> None:
    fact = event.fact
    parent = getattr(fact, "result", None)
    parent_ref = None if parent is None or parent.parent_ref is None else parent.parent_ref.ref_id
    turn.batch.results.append(
        ResultRow(
            event.execution_id,
            event.event_id,
            parent_ref,
            getattr(fact, "step", ""),
            stored.tier,
            stored.uri,
            stored.media_type,
            stored.size,
            stored.sha256,
            stored.inline,
        )
    )
    if stored.ttl_s is not None:
        turn.batch.expiries.append(ExpiryRow(event.execution_id, event.event_id, stored.ttl_s))
