"""noetl.event as clients read it: columns as they are, JSON as text, nothing folded."""

from typing import TYPE_CHECKING

from noetl_core.domain.ids import EventId, ExecutionId, RefId
from noetl_core.store.postgres import Connection, Pool

if TYPE_CHECKING:
    from asyncpg import Record

COLUMNS = """
event_id, event_type, status, node_name, command_id, loop_id, iter_index, attempt,
parent_event_id, parent_execution_id, catalog_id, epoch_id, context, result, meta, error,
created_at
"""

_PAGE = f"""
SELECT {COLUMNS}
FROM noetl.event
WHERE execution_id = $1 AND event_id > $2
ORDER BY event_id
LIMIT $3
"""  # noqa: S608 - a constant


async def page(
    conn: Connection | Pool, execution_id: ExecutionId, *, after: EventId, limit: int
) -> "list[Record]":
    """Events in log order, past `after`."""
    return list(await conn.fetch(_PAGE, execution_id, after, limit))


ENDS_OF_CALLS = """(
'call.done', 'call.error', 'call.partial', 'retry.completed', 'loop.shard.done',
'loop.shard.failed', 'step.exit'
)"""

_RECORDED_AS = f"""
SELECT {COLUMNS}
FROM noetl.event
WHERE execution_id = $1 AND event_id = $2 AND result IS NOT NULL
"""  # noqa: S608 - a constant

# The end of a loop says nothing of its result: the end of its step, right after it, does.
_LOOP_RECORDED_AS = f"""
WITH ended AS (
    SELECT event_id AS after, node_name AS step
    FROM noetl.event
    WHERE execution_id = $1 AND loop_id = $2 AND iter_index IS NULL
    ORDER BY event_id DESC LIMIT 1
)
SELECT {COLUMNS}
FROM noetl.event, ended
WHERE execution_id = $1 AND event_id > ended.after AND node_name = ended.step
  AND event_type = 'step.exit' AND (result -> 'reference' ->> 'ref_id')::bigint = $2
ORDER BY event_id
LIMIT 1
"""  # noqa: S608 - a constant

# Looks at every event of the execution: only for what has no id of this log (a child, pages).
_REFERRING_TO = f"""
SELECT {COLUMNS}
FROM noetl.event
WHERE execution_id = $1 AND result IS NOT NULL AND iter_index IS NULL
  AND event_type IN {ENDS_OF_CALLS}
  AND (result -> 'reference' ->> 'ref_id')::bigint = $2
ORDER BY event_type = 'step.exit', event_id DESC
LIMIT 1
"""  # noqa: S608 - a constant


async def recorded_as(
    conn: Connection | Pool, execution_id: ExecutionId, ref_id: RefId
) -> "Record | None":
    """The event that has the id of a result: it ended, or nearly ended, the call."""
    return await conn.fetchrow(_RECORDED_AS, execution_id, ref_id)


async def referring_to(
    conn: Connection | Pool, execution_id: ExecutionId, ref_id: RefId
) -> "Record | None":
    """The event that ended a call or a loop whose result has an id of its own."""
    row = await conn.fetchrow(_LOOP_RECORDED_AS, execution_id, ref_id)
    return row or await conn.fetchrow(_REFERRING_TO, execution_id, ref_id)
