"""What decisions read of the result store, with what the turn itself has not committed yet."""

from typing import Any

import msgspec

from noetl_broker.states import Live
from noetl_broker.turn import Turn
from noetl_core.blob.result_store import ResultStore
from noetl_core.domain.envelope import Envelope, Reference
from noetl_core.domain.errors import ReferenceNeeded
from noetl_core.domain.ids import EventId, LoopId, RefId
from noetl_core.store.event import EventRow
from noetl_core.wire.messages import Stored

_ENDS_ITERATION = frozenset({"call.done", "loop.shard.done", "retry.completed"})


class Reader:
    def __init__(self, results: ResultStore) -> None:
        self._results = results

    async def load(self, turn: Turn, live: Live, needed: ReferenceNeeded) -> None:
        """Put what a decision has asked for where it looks for it."""
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
