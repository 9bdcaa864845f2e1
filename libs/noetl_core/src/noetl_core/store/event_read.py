"""noetl.event as clients page through it: columns as they are, JSON as text, nothing folded."""

from typing import TYPE_CHECKING

from noetl_core.domain.ids import EventId, ExecutionId
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
