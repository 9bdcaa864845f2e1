"""Writes what the broker's commits would: ends of calls with their results, manifests, pages."""

import hashlib
from itertools import count
from typing import Any

import msgspec

from noetl_core.domain.envelope import Envelope, Reference
from noetl_core.domain.errors import ToolError
from noetl_core.domain.events import (
    Again,
    AnyFact,
    CallDone,
    CallFailed,
    CommandExpired,
    CommandIssued,
    Event,
    RetryCompleted,
    ShardDone,
    ShardFailed,
)
from noetl_core.domain.ids import (
    EventId,
    ExecutionId,
    LoopId,
    RefId,
    ShardId,
    StepName,
    WorkerId,
    command_id,
)
from noetl_core.store.event import EventRow, event_row
from noetl_core.store.postgres import Pool

STEP = StepName("each")
NOTHING: Any = object()
"""A call that returned no result at all."""

_EVENT = "INSERT INTO noetl.event ({}) VALUES ({})".format(
    ", ".join(EventRow._fields), ", ".join(f"${n + 1}" for n in range(len(EventRow._fields)))
)
_RESULT = """
INSERT INTO noetl.result_ref (execution_id, ref_id, step, store_tier, bytes, sha256, inline)
VALUES ($1, $2, $3, 'db', $4, $5, $6)
"""
_MANIFEST = """
INSERT INTO noetl.manifest (execution_id, manifest_id, kind, item_count, part_count, meta)
VALUES ($1, $2, $3, $4::integer, $4::integer, $5)
"""
_PAGE = """
INSERT INTO noetl.manifest_part (
    execution_id, manifest_id, part_index, item_count, store_tier, bytes, ref_id
)
VALUES ($1, $2, $3, 1, 'result', $4, $5)
"""


class LoopLog:
    """The log of an execution with one loop; ids ascend as they do for one writer."""

    def __init__(self, pool: Pool, execution_id: int = 1, *, first_id: int = 1000) -> None:
        self.pool = pool
        self.execution_id = ExecutionId(execution_id)
        self.loop_id = LoopId(10)
        self._ids = count(first_id)

    async def started(self, total: int, *, base: LoopId | None = None) -> LoopId:
        """From here on, everything belongs to this activation."""
        self.loop_id = LoopId(next(self._ids))
        meta = None if base is None else {"base": str(base)}
        await self._manifest(EventId(self.loop_id), "collection", total, meta)
        return self.loop_id

    async def issued(self, index: int) -> None:
        await self._append(CommandIssued(**self._place(index)), EventId(next(self._ids)))

    async def done(
        self, index: int | None, document: Any = NOTHING, *, is_shard: bool = False, **fields: Any
    ) -> EventId:
        event_id = EventId(next(self._ids))
        reference = await self.result(event_id, document)
        fact = (ShardDone if is_shard else CallDone)(
            worker_id=WorkerId("w"),
            result=Envelope(status="ok", reference=fields.pop("reference", reference)),
            **self._place(index, page=fields.pop("page", 1)),
            **fields,
        )
        await self._append(fact, event_id)
        return event_id

    async def failed(self, index: int, *, is_shard: bool = False, **fields: Any) -> None:
        fact = (ShardFailed if is_shard else CallFailed)(
            worker_id=WorkerId("w"),
            result=Envelope(status="error"),
            error=ToolError(kind="timeout", message="too long"),
            **self._place(index, page=fields.pop("page", 1)),
            **fields,
        )
        await self._append(fact, EventId(next(self._ids)))

    async def expired(self, index: int, *, again: Again | None = None) -> None:
        lost = ToolError(kind="lost", message="the worker is gone")
        fact = CommandExpired(error=lost, again=again, **self._place(index))
        await self._append(fact, EventId(next(self._ids)))

    async def paged(self, index: int | None, *documents: Any, goes_on: bool = False) -> EventId:
        """Pages, the last of which another follows if it `goes_on`; `complete` ends them."""
        sequence: EventId | None = None
        for page, document in enumerate(documents, start=1):
            follows = goes_on or page < len(documents)
            again = Again(attempt=1, page=page + 1, sequence=sequence) if follows else None
            event_id = await self.done(index, document, page=page, sequence=sequence, again=again)
            sequence = sequence or event_id
            if document is not NOTHING:
                size = len(msgspec.json.encode(document))
                key = (self.execution_id, sequence)
                await self.pool.execute(_PAGE, *key, page - 1, size, event_id)
        assert sequence is not None
        return sequence

    async def complete(
        self,
        index: int | None,
        sequence: EventId,
        *,
        pages: int,
        collect: str = "append",
        merge_path: str = "",
    ) -> Reference:
        """The sequence is over; `pages` is how many it has."""
        reference = Reference(ref_id=RefId(sequence), type="pages")
        place = self._place(index)
        fact = RetryCompleted(
            result=Envelope(status="ok", reference=reference),
            sequence=sequence,
            pages=pages,
            **{name: place[name] for name in ("step", "visit", "loop_id", "iter_index")},
        )
        await self._append(fact, EventId(next(self._ids)))
        meta = {"collect": collect, "merge_path": merge_path}
        await self._manifest(sequence, "pages", pages, meta)
        return reference

    async def result(self, event_id: EventId, document: Any) -> Reference | None:
        if document is NOTHING:
            return None
        body = msgspec.json.encode(document)
        digest = hashlib.sha256(body).digest()
        await self.pool.execute(_RESULT, self.execution_id, event_id, STEP, len(body), digest, body)
        return Reference(ref_id=RefId(event_id), type="db", bytes=len(body))

    def _place(self, index: int | None, *, page: int = 1) -> dict[str, Any]:
        attempt = next(self._ids)
        return {
            "step": STEP,
            "visit": 1,
            "command_id": command_id(STEP, 1, index=index, attempt=attempt, page=page),
            "loop_id": None if index is None else self.loop_id,
            "iter_index": index,
        }

    async def _append(self, fact: AnyFact, event_id: EventId) -> None:
        event = Event(execution_id=self.execution_id, event_id=event_id, fact=fact)
        row = event_row(event, shard_id=ShardId(0), epoch_id=None)
        key = f"{row.event_key} of {event_id}"
        await self.pool.execute(_EVENT, *row._replace(event_key=key))

    async def _manifest(
        self, manifest_id: EventId, kind: str, total: int, meta: dict[str, str] | None
    ) -> None:
        document = None if meta is None else msgspec.json.encode(meta).decode()
        key = (self.execution_id, manifest_id)
        await self.pool.execute(_MANIFEST, *key, kind, total, document)
