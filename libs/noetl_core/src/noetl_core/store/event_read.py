"""noetl.event as clients page through it: columns as they are, JSON as text, nothing folded.

A loop with a million items is read the same way: page by page, never as one list.
"""

from typing import TYPE_CHECKING, NamedTuple

from noetl_core.domain.ids import EventId, ExecutionId, LoopId
from noetl_core.store.postgres import Connection, Pool

if TYPE_CHECKING:
    from asyncpg import Record

_PAGE = """
SELECT event_id, event_type, status, node_name, command_id, loop_id, iter_index, attempt,
       parent_event_id, parent_execution_id, catalog_id, epoch_id, context, result, meta, error,
       created_at
FROM noetl.event
WHERE execution_id = $1 AND event_id > $2
ORDER BY event_id
LIMIT $3
"""


async def page(
    conn: Connection | Pool, execution_id: ExecutionId, *, after: EventId, limit: int
) -> "list[Record]":
    """Events in log order, past `after`."""
    return list(await conn.fetch(_PAGE, execution_id, after, limit))


_LOOP_BYTES = """
SELECT coalesce(sum(r.bytes), 0)::bigint
FROM noetl.event e
JOIN noetl.result_ref r ON r.execution_id = e.execution_id AND r.ref_id = e.event_id
WHERE e.execution_id = $1 AND e.loop_id = $2 AND e.event_type = 'call.done'
"""


async def loop_bytes(conn: Connection | Pool, execution_id: ExecutionId, loop_id: LoopId) -> int:
    """How much the results of a loop weigh together."""
    return int(await conn.fetchval(_LOOP_BYTES, execution_id, loop_id))


class Iteration(NamedTuple):
    """One successful iteration; `media_type` is None if it returned nothing, `inline` if it is
    kept in a tier outside the database.
    """

    iter_index: int
    event_id: EventId
    media_type: str | None
    inline: bytes | None


_LOOP_PAGE = """
SELECT e.iter_index, e.event_id, r.media_type, r.inline
FROM noetl.event e
LEFT JOIN noetl.result_ref r ON r.execution_id = e.execution_id AND r.ref_id = e.event_id
WHERE e.execution_id = $1 AND e.loop_id = $2 AND e.event_type = 'call.done' AND e.iter_index > $3
ORDER BY e.iter_index
LIMIT $4
"""


async def loop_page(
    conn: Connection | Pool,
    execution_id: ExecutionId,
    loop_id: LoopId,
    *,
    after_index: int,
    limit: int,
) -> list[Iteration]:
    """Results of a loop in order of their items, past `after_index`; failed ones are left out."""
    rows = await conn.fetch(_LOOP_PAGE, execution_id, loop_id, after_index, limit)
    return [Iteration(*row) for row in rows]
