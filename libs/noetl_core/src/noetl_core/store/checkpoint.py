"""noetl.checkpoint: the epochs that are closed in the log and passed by the projection."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from noetl_core.domain.ids import EventId, ExecutionId, ShardId
from noetl_core.store.postgres import Connection, Pool

_RESUME = """
SELECT wanted.shard_id, coalesce(newest.last_event_id, 0) AS event_id
FROM unnest($1::integer[]) AS wanted (shard_id)
LEFT JOIN LATERAL (
    SELECT last_event_id FROM noetl.checkpoint
    WHERE shard_id = wanted.shard_id
    ORDER BY epoch DESC, last_event_id DESC
    LIMIT 1
) AS newest ON true
"""


async def resume(conn: Connection | Pool, shards: Iterable[ShardId]) -> dict[ShardId, EventId]:
    """Where the search for closed epochs goes on, by shard: everything before it is recorded."""
    rows = await conn.fetch(_RESUME, list(shards))
    return {ShardId(row["shard_id"]): EventId(row["event_id"]) for row in rows}


class Recorded(NamedTuple):
    searched: dict[ShardId, EventId]
    """The last event that was looked at, of each shard that had any."""
    executions: list[ExecutionId]
    """Whose epochs were recorded."""


# The rows of a shard are looked at in log order and recorded together with everything before them,
# so the newest recorded one is a place to go on from.
_RECORD = """
WITH passed AS (
    SELECT wanted.shard_id, e.execution_id, e.event_id, e.epoch, e.created_at
    FROM unnest($1::integer[], $2::bigint[]) AS wanted (shard_id, after_id)
    JOIN noetl.projection_checkpoint AS p ON p.shard_id = wanted.shard_id
    CROSS JOIN LATERAL (
        SELECT execution_id, event_id, created_at,
               CASE WHEN event_type = 'checkpoint.committed' THEN context ->> 'barrier' END AS epoch
        FROM noetl.event
        WHERE shard_id = wanted.shard_id
          AND event_id > wanted.after_id AND event_id <= p.last_projected_event_id
        ORDER BY event_id
        LIMIT $3
    ) AS e
),
recorded AS (
    INSERT INTO noetl.checkpoint (execution_id, shard_id, epoch, last_event_id, committed_at)
    SELECT execution_id, shard_id, epoch::bigint, event_id, created_at
    FROM passed WHERE epoch ~ '^[0-9]+$'
    ON CONFLICT DO NOTHING
    RETURNING execution_id
)
SELECT shard_id, max(event_id) AS searched_to,
       (SELECT array_agg(DISTINCT execution_id) FROM recorded) AS executions
FROM passed GROUP BY shard_id
"""


async def record(
    conn: Connection | Pool, searched: Mapping[ShardId, EventId], *, limit: int
) -> Recorded:
    """Record the epochs that the projection has passed, looking at `limit` events of each shard."""
    rows = await conn.fetch(_RECORD, list(searched), list(searched.values()), limit)
    executions = rows[0]["executions"] if rows else None
    return Recorded(
        searched={ShardId(row["shard_id"]): EventId(row["searched_to"]) for row in rows},
        executions=[ExecutionId(one) for one in executions or ()],
    )


_PRUNE = """
DELETE FROM noetl.checkpoint AS c
USING (
    SELECT execution_id, epoch,
           row_number() OVER (PARTITION BY execution_id ORDER BY epoch DESC) AS place
    FROM noetl.checkpoint WHERE execution_id = ANY ($1::bigint[])
) AS ranked
WHERE c.execution_id = ranked.execution_id AND c.epoch = ranked.epoch AND ranked.place > $2
"""


async def prune(
    conn: Connection | Pool, execution_ids: Iterable[ExecutionId], *, keep: int
) -> None:
    """Leave these executions their newest `keep` epochs."""
    await conn.execute(_PRUNE, list(execution_ids), keep)


# From the first event that no recorded epoch covers: that is what would be replayed. A shard in
# which nothing moved since its last epoch has no age, however long ago that was, and what has ended
# needs no epoch any more.
_AGES = """
SELECT wanted.shard_id,
       extract(epoch FROM clock_timestamp() - uncovered.since) * 1000 AS age_ms
FROM unnest($1::integer[]) AS wanted (shard_id)
LEFT JOIN LATERAL (
    SELECT committed_at, last_event_id FROM noetl.checkpoint
    WHERE shard_id = wanted.shard_id
    ORDER BY epoch DESC, last_event_id DESC
    LIMIT 1
) AS newest ON true
CROSS JOIN LATERAL (
    SELECT min(first.created_at) AS since
    FROM noetl.execution AS x
    CROSS JOIN LATERAL (
        SELECT created_at FROM noetl.event
        WHERE execution_id = x.execution_id AND event_id > coalesce(newest.last_event_id, 0)
        ORDER BY event_id
        LIMIT 1
    ) AS first
    WHERE x.shard_id = wanted.shard_id AND x.status IN ('PENDING', 'RUNNING')
      AND x.updated_at > coalesce(newest.committed_at, '-infinity')
) AS uncovered
WHERE uncovered.since IS NOT NULL
"""


async def ages_ms(conn: Connection | Pool, shards: Iterable[ShardId]) -> dict[ShardId, float]:
    """How long work has been going on past the last closed epoch, by shard that has such work."""
    rows = await conn.fetch(_AGES, list(shards))
    return {ShardId(row["shard_id"]): float(row["age_ms"]) for row in rows}
