"""noetl.projection_checkpoint: how far each shard of the log has been projected.

The watermark moves in the statement that writes the rows it stands for (execution_projection.py).
"""

from collections.abc import Iterable

from noetl_core.domain.ids import EventId, ShardId
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
