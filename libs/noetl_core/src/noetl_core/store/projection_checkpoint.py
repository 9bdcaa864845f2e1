"""noetl.projection_checkpoint: how far each shard of the log has been projected.

The watermark moves in the statement that writes the rows it stands for (execution_projection.py).
"""

from collections.abc import Iterable

from noetl_core.domain.ids import EventId, ExecutionId, ShardId
from noetl_core.store.postgres import Connection, Pool

_READ = """
SELECT wanted.shard_id, coalesce(c.last_projected_event_id, 0) AS watermark
FROM unnest($1::integer[]) AS wanted (shard_id)
LEFT JOIN noetl.projection_checkpoint AS c USING (shard_id)
"""


async def watermarks(conn: Connection | Pool, shards: Iterable[ShardId]) -> dict[ShardId, EventId]:
    """The last projected event of each of these shards; 0 for one that has none."""
    rows = await conn.fetch(_READ, list(shards))
    return {ShardId(row["shard_id"]): EventId(row["watermark"]) for row in rows}


# Nothing past a change of the shard count is read before every shard has come there, so whatever
# lies before a projected event of an execution is projected too, on whichever shards it lies.
_PROJECTED_UPTO = """
SELECT e.event_id
FROM noetl.event AS e
JOIN noetl.projection_checkpoint AS p USING (shard_id)
WHERE e.execution_id = $1 AND e.event_id <= p.last_projected_event_id
ORDER BY e.event_id DESC
LIMIT 1
"""


async def projected_upto(conn: Connection | Pool, execution_id: ExecutionId) -> EventId:
    """The newest event of the execution that a watermark covers; 0 when none does."""
    return EventId(await conn.fetchval(_PROJECTED_UPTO, execution_id) or 0)


# An event lies on the shard that it was written under, which the execution may have left since.
_SHOWS = """
SELECT EXISTS (
    SELECT FROM noetl.execution WHERE execution_id = $1 AND last_projected_event_id >= $2
) OR EXISTS (
    SELECT FROM noetl.projection_checkpoint
    WHERE last_projected_event_id >= $2 AND shard_id = coalesce(
        (SELECT shard_id FROM noetl.event WHERE execution_id = $1 AND event_id = $2), $3
    )
)
"""


async def shows(
    conn: Connection | Pool, execution_id: ExecutionId, event_id: EventId, *, shard: ShardId
) -> bool:
    """True when what can be read of the execution is not older than the event.

    `shard` is where the execution lies; it counts for an event of another execution.
    """
    return bool(await conn.fetchval(_SHOWS, execution_id, event_id, shard))
