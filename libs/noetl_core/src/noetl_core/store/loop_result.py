"""What the items of a loop came to, read back from the log.

An item ends once, but it may take several calls: attempts that failed and pages that another
followed carry `again` in their context. After a retry of the execution it may also take several
activations of the loop, each with greater ids than the one before. So the last event that ended a
call for an item, in whichever activation, says how the item stands.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from noetl_core.domain.envelope import INLINE_BYTES_MAX, Reference
from noetl_core.domain.ids import EventId, ExecutionId, LoopId, RefId
from noetl_core.store.postgres import Connection, Pool
from noetl_core.store.result_ref import StoredRow

INDEX_MAX = 2**31 - 1

_decode_reference = msgspec.json.Decoder(Reference).decode


class Ended(NamedTuple):
    """An item that has ended. Its result is `row`, or behind `reference`, or there is none."""

    iter_index: int
    event_id: EventId
    is_done: bool
    """False: it failed, and no attempt follows."""
    is_frame: bool
    """Of a cursor: rows were claimed. Without any it was only the end of the work."""
    row: StoredRow | None
    """Only one of up to INLINE_BYTES_MAX comes with its bytes."""
    reference: Reference | None
    """Pages, or what belongs to another event: the result of a child, the data of a signal."""

    @property
    def elsewhere(self) -> Reference | None:
        """What must be asked for, because its bytes did not come along."""
        if self.row is None or self.row.inline is not None:
            return self.reference
        kind: Literal["db", "object_store"] = "db" if self.row.tier == "db" else "object_store"
        return Reference(ref_id=RefId(self.event_id), type=kind, bytes=self.row.size)


# The index on (execution_id, loop_id, iter_index) gives these rows and nothing else of the log.
_LAST = """
SELECT DISTINCT ON (iter_index)
    iter_index, event_id, result,
    event_type IN ('call.done', 'loop.shard.done', 'retry.completed') AS is_done,
    coalesce(context ? 'again', false) AS has_again,
    event_type = 'retry.completed' OR coalesce((context ->> 'frame_rows')::integer, 0) > 0
        AS is_frame
FROM noetl.event
WHERE execution_id = $1 AND loop_id = ANY ($2::bigint[]) AND iter_index >= $3 AND iter_index < $4
  AND event_type IN (
    'call.done', 'call.error', 'loop.shard.done', 'loop.shard.failed', 'command.expired',
    'retry.completed'
  )
ORDER BY iter_index, event_id DESC
"""

_OF_LOOP = f"""
SELECT last.iter_index, last.event_id, last.is_done, last.is_frame,
       CASE WHEN last.is_done AND r.ref_id IS NULL THEN last.result ->> 'reference' END,
       r.store_tier, r.physical_uri, r.media_type, r.bytes, r.sha256,
       CASE WHEN r.bytes <= $5 THEN r.inline END, r.expires_at,
       r.removed_at IS NOT NULL
FROM ({_LAST}) AS last
LEFT JOIN noetl.result_ref r
    ON r.execution_id = $1 AND r.ref_id = last.event_id AND last.is_done
WHERE NOT last.has_again
ORDER BY last.iter_index
"""  # noqa: S608 - a constant


async def of_loop(
    conn: Connection | Pool,
    execution_id: ExecutionId,
    loop_ids: Sequence[LoopId],
    *,
    start: int = 0,
    stop: int = INDEX_MAX,
) -> list[Ended]:
    """The items from `start` up to `stop` that have ended, in order."""
    rows = await conn.fetch(_OF_LOOP, execution_id, loop_ids, start, stop, INLINE_BYTES_MAX)
    return [
        Ended(
            row[0],
            row[1],
            row[2],
            row[3],
            None if row[5] is None else StoredRow(*row[5:]),
            None if row[4] is None else _decode_reference(row[4]),
        )
        for row in rows
    ]


_UNDONE = f"""
SELECT item FROM generate_series(0, $5::integer - 1) AS item
EXCEPT
SELECT iter_index FROM ({_LAST}) AS last WHERE is_done AND NOT has_again
ORDER BY item
"""  # noqa: S608 - a constant


async def undone(
    conn: Connection | Pool,
    execution_id: ExecutionId,
    loop_ids: Sequence[LoopId],
    *,
    total: int,
) -> list[int]:
    """The items that have not ended well; those that were never begun are among them."""
    rows = await conn.fetch(_UNDONE, execution_id, loop_ids, 0, INDEX_MAX, total)
    return [row[0] for row in rows]


_LAST_INDEX = """
SELECT coalesce(max(newest.iter_index), -1)
FROM unnest($2::bigint[]) AS wanted (loop_id)
CROSS JOIN LATERAL (
    SELECT e.iter_index FROM noetl.event e
    WHERE e.execution_id = $1 AND e.loop_id = wanted.loop_id AND e.iter_index IS NOT NULL
    ORDER BY e.iter_index DESC LIMIT 1
) AS newest
"""


async def last_index(
    conn: Connection | Pool, execution_id: ExecutionId, loop_ids: Sequence[LoopId]
) -> int:
    """The greatest index that the log knows of; -1 for none."""
    return int(await conn.fetchval(_LAST_INDEX, execution_id, loop_ids))


class Weight(NamedTuple):
    bytes: int
    loops: list[Reference]
    """Lists of loops in other executions, which are not weighed yet."""


_WEIGHT = f"""
SELECT coalesce(sum(coalesce(r.bytes, pages.bytes, (item.reference ->> 'bytes')::bigint)), 0)
           ::bigint,
       array_agg(item.reference::text) FILTER (WHERE item.reference ->> 'type' = 'eventlog')
FROM (
    SELECT event_id, result -> 'reference' AS reference
    FROM ({_LAST}) AS last WHERE is_done AND NOT has_again
) AS item
LEFT JOIN noetl.result_ref r ON r.execution_id = $1 AND r.ref_id = item.event_id
LEFT JOIN LATERAL (
    SELECT sum(p.bytes)::bigint AS bytes FROM noetl.manifest_part p
    WHERE item.reference ->> 'type' = 'pages'
      AND p.execution_id = coalesce((item.reference ->> 'execution_id')::bigint, $1)
      AND p.manifest_id = (item.reference ->> 'ref_id')::bigint
) AS pages ON item.reference ->> 'type' = 'pages'
"""  # noqa: S608 - a constant


async def weight(
    conn: Connection | Pool, execution_id: ExecutionId, loop_ids: Sequence[LoopId]
) -> Weight:
    """How much the results of a loop weigh together."""
    row = await conn.fetchrow(_WEIGHT, execution_id, loop_ids, 0, INDEX_MAX)
    assert row is not None
    return Weight(row[0], [_decode_reference(text) for text in row[1] or ()])
