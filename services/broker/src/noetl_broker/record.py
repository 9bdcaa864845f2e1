"""Facts into rows: what follows from a new fact, and the rows beside the log that go with it."""

import itertools
from collections.abc import Callable, Iterator

from noetl_broker.states import Live, Playbooks
from noetl_broker.turn import Turn
from noetl_core.blob.result_store import ResultStore
from noetl_core.domain.brief import brief_for, encode_brief
from noetl_core.domain.decide import Recorded, follow
from noetl_core.domain.envelope import Reference
from noetl_core.domain.errors import ReferenceNeeded
from noetl_core.domain.events import (
    AnyFact,
    CallDone,
    CallFailed,
    CommandExpired,
    CommandIssued,
    Event,
    ExecutionCancelled,
    ExecutionCompleted,
    ExecutionFailed,
    ExecutionStarted,
    LoopStarted,
)
from noetl_core.domain.ids import CommandId, EpochId, EventId, LoopId, RefId, ShardId
from noetl_core.domain.loop import split
from noetl_core.domain.playbook import Playbook
from noetl_core.store.batch import CollectionRow, CommandRow, EndedRow, PartRow, ResultRow
from noetl_core.store.event import event_row
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
                    turn.batch.results.append(_result_row(item.event, stored))
                    stored = None

    def append(self, turn: Turn, shard: ShardId, event: Event) -> None:
        epoch = self.epochs.get(shard)
        turn.batch.events.append(event_row(event, shard_id=shard, epoch_id=epoch))

    async def _write(
        self, turn: Turn, shard: ShardId, playbook: Playbook, live: Live, item: Recorded
    ) -> None:
        """The rows beside the log that go with an event."""
        execution_id = item.event.execution_id
        match item.event.fact:
            case CommandIssued() as fact:
                row = await self._command_row(turn, shard, playbook, live, fact)
                turn.batch.commands.append(row)
                turn.work[shard, fact.pool] += 1
            case CallDone() | CallFailed() as fact:
                turn.batch.ended.append(EndedRow(execution_id, fact.command_id, fact.worker_id))
            case CommandExpired() as fact:
                turn.batch.ended.append(EndedRow(execution_id, fact.command_id, None))
            case LoopStarted() as fact:
                await self._store_collection(turn, live, item, fact)
            case ExecutionFailed() | ExecutionCancelled():
                turn.batch.ended_executions.append(execution_id)
                turn.ended_on.add(shard)
            case ExecutionCompleted():
                turn.ended_on.add(shard)
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
        turn.batch.collections.append(
            CollectionRow(execution_id, loop_id, fact.step, fact.total, fact.parts)
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
        if needed.part is not None:
            assert needed.loop_id is not None, needed
            key = (needed.loop_id, needed.part)
            known.parts[key] = await self._results.part(turn.conn, execution_id, *key)
        elif needed.loop_id is not None:
            known.loops[needed.loop_id] = await self._results.results_of_loop(
                turn.conn,
                execution_id,
                needed.loop_id,
                fresh=_fresh_iterations(turn, live, needed.loop_id),
            )
        else:
            assert needed.ref_id is not None, needed
            known.results[needed.ref_id] = await self._document(turn, live, needed.ref_id)

    async def _document(self, turn: Turn, live: Live, ref_id: RefId) -> object:
        """A result that came with a message of this turn is not in the database yet."""
        stored = live.fresh.get(ref_id)
        if stored is not None:
            return await self._results.read_stored(live.state.execution_id, stored)
        reference = Reference(ref_id=ref_id, type="db")
        return await self._results.get(turn.conn, live.state.execution_id, reference)


def _fresh_iterations(turn: Turn, live: Live, loop_id: LoopId) -> dict[int, Stored]:
    """The last iterations of a loop are recorded in the turn that ends it."""
    return {
        row.iter_index: live.fresh[RefId(EventId(row.event_id))]
        for row in turn.batch.events
        if row.loop_id == loop_id
        and row.iter_index is not None
        and row.execution_id == live.state.execution_id
        and row.event_id in live.fresh
        and row.event_type == "call.done"
    }


def _result_row(event: Event, stored: Stored) -> ResultRow:
    fact = event.fact
    parent = getattr(fact, "result", None)
    parent_ref = None if parent is None or parent.parent_ref is None else parent.parent_ref.ref_id
    return ResultRow(
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
