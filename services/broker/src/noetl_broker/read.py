"""What decisions read of the result store, with what the turn itself has not committed yet."""

from typing import Any

import msgspec

from noetl_broker.states import Live
from noetl_broker.turn import Turn
from noetl_core.blob import ReferenceNotAvailableError
from noetl_core.blob.away import StoreRefusedError
from noetl_core.blob.result_store import Resolved, ResultStore
from noetl_core.domain.envelope import Envelope, Reference
from noetl_core.domain.errors import ReferenceNeeded
from noetl_core.domain.ids import EventId, LoopId, RefId
from noetl_core.store.event import EventRow
from noetl_core.wire.messages import Stored

_ENDS_ITERATION = frozenset({"call.done", "loop.shard.done", "retry.completed"})
_FAILS_ITERATION = frozenset({"call.error", "loop.shard.failed", "command.expired"})


class Reader:
    def __init__(self, results: ResultStore) -> None:
        self._results = results

    async def load(self, turn: Turn, live: Live, needed: ReferenceNeeded) -> None:
        """Put what a decision has asked for where it looks for it.

        A store that does not answer is waited for, like the database. One that refuses us would
        be waited for in vain: that is the end of this execution, and of no other.
        """
        try:
            await self._load(turn, live, needed)
        except StoreRefusedError as error:
            execution_id = live.state.execution_id
            raise ReferenceNotAvailableError(str(error), execution_id=execution_id) from error

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
        elif reference.type == "pages":
            known.pages[reference.ref_id] = await self._document(turn, live, reference)
        else:
            known.results[reference.ref_id] = await self._document(turn, live, reference)

    async def _loop_results(self, turn: Turn, live: Live, loop_id: LoopId) -> list[Any]:
        """The last iterations of a loop are recorded in the turn that ends it."""
        execution_id = live.state.execution_id
        own = [m for m in turn.batch.manifests if m.manifest_id == loop_id]
        base = msgspec.json.decode(own[0].meta)["base"] if own and own[0].meta else None
        return await self._results.results_of_loop(
            turn.conn,
            execution_id,
            loop_id,
            fresh=await self._fresh_iterations(turn, live, loop_id),
            base=None if base is None else LoopId(int(base)),
        )

    async def _fresh_iterations(
        self, turn: Turn, live: Live, loop_id: LoopId
    ) -> dict[int, Stored | Resolved]:
        fresh: dict[int, Stored | Resolved] = {}
        for row in turn.batch.events:
            is_of_loop = row.loop_id == loop_id and row.execution_id == live.state.execution_id
            if not is_of_loop or row.iter_index is None or _gives_nothing(row):
                continue
            if row.event_type in _FAILS_ITERATION:
                fresh[row.iter_index] = Resolved(None)
            elif row.event_type in _ENDS_ITERATION and row.result is not None:
                reference = msgspec.json.decode(row.result, type=Envelope).reference
                if reference is not None:
                    document = await self._document(turn, live, reference)
                    fresh[row.iter_index] = Resolved(document)
        return fresh

    async def _document(self, turn: Turn, live: Live, reference: Reference) -> Any:
        """A result that came with a message of this turn is not in the database yet."""
        execution_id = live.state.execution_id
        if reference.type == "pages" and reference.execution_id is None:
            return await self._pages(turn, live, EventId(reference.ref_id))
        stored = live.fresh.get(reference.ref_id)
        if stored is not None and reference.type != "pages":
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


def _gives_nothing(row: EventRow) -> bool:
    """Whether another attempt or page of the item follows, or a cursor found no more rows."""
    context = {} if row.context is None else msgspec.json.decode(row.context)
    return "again" in context or context.get("frame_rows") == 0
