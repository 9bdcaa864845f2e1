"""noetl.checkpoint: the epochs that are closed in the log and passed by the projection."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from noetl_core.domain.ids import ID_MAX, EpochId, EventId, ExecutionId, ShardId
from noetl_core.store.postgres import Connection, Pool
from noetl_core.store.resize import Generation

_RESUME = """
SELECT wanted.shard_id, coalesce(newest.last_event_id, 0) AS event_id
FROM unnest($1::integer[]) AS wanted (shard_id)
LEFT JOIN LATERAL (
    SELECT last_event_id FROM noetl.checkpoint
    WHERE shard_id = wanted.shard_id
    ORDER BY last_event_id DESC
    LIMIT 1
) AS newest ON true
"""


async def resume(conn: Connection | Pool, shards: Iterable[ShardId]) -> dict[ShardId, EventId]:
    """Where the search for closed epochs goes on, by shard: everything before it is recorded."""
    rows = await conn.fetch(_RESUME, list(shards))
    return {ShardId(row["shard_id"]): EventId(row["event_id"]) for row in rows}


# A number that fits a bigint: whatever else stands there is no epoch, and stops nothing.
_IS_EPOCH = "'^([0-9]{1,18}|[1-8][0-9]{18})$'"

_NEWEST_EPOCH = f"""
SELECT greatest(
    (SELECT max(epoch) FROM noetl.checkpoint),
    (
        SELECT max(CASE WHEN newest.epoch ~ {_IS_EPOCH} THEN newest.epoch::bigint END)
        FROM unnest($1::integer[]) AS wanted (shard_id)
        CROSS JOIN LATERAL (
            SELECT context ->> 'barrier' AS epoch FROM noetl.event
            WHERE event_type = 'checkpoint.committed' AND shard_id = wanted.shard_id
            ORDER BY event_id DESC
            LIMIT 1
        ) AS newest
    )
)
"""  # noqa: S608 - the pattern is a constant


async def newest_epoch(conn: Connection | Pool, shards: Iterable[ShardId]) -> EpochId:
    """The highest epoch that was recorded or closed; 0 when there is none."""
    return EpochId(await conn.fetchval(_NEWEST_EPOCH, list(shards)) or 0)


# The last events of each shard: who moved since the last barrier moved a moment ago. Where the
# count of shards changed, what an execution did before lies on the shard of then.
_LEFT_OPEN = """
SELECT noetl.vnode(moved.execution_id) % $2 AS shard_id, moved.execution_id
FROM (
    SELECT tail.execution_id, max(tail.event_id) AS event_id
    FROM noetl.execution_shard AS s
    LEFT JOIN LATERAL (
        SELECT last_event_id FROM noetl.checkpoint
        WHERE shard_id = s.shard_id
        ORDER BY last_event_id DESC
        LIMIT 1
    ) AS newest ON true
    CROSS JOIN LATERAL (
        SELECT event_id, execution_id FROM noetl.event
        WHERE shard_id = s.shard_id AND event_id > coalesce(newest.last_event_id, 0)
          AND event_id <= CASE WHEN s.shard_id = ANY ($1::integer[]) THEN $4::bigint ELSE $3 END
        ORDER BY event_id DESC
        LIMIT $5
    ) AS tail
    WHERE s.role = 'broker'
    GROUP BY tail.execution_id
) AS moved
WHERE noetl.vnode(moved.execution_id) % $2 = ANY ($1::integer[])
  AND coalesce(
      (SELECT status FROM noetl.execution WHERE execution_id = moved.execution_id), 'PENDING'
  ) IN ('PENDING', 'RUNNING', 'PAUSED')
  AND coalesce(
      (SELECT max(last_event_id) FROM noetl.checkpoint WHERE execution_id = moved.execution_id), 0
  ) < moved.event_id
"""


async def left_open(
    conn: Connection | Pool, shards: Iterable[ShardId], generation: Generation, *, limit: int
) -> dict[ShardId, set[ExecutionId]]:
    """Who of these shards goes on and has moved past its last recorded epoch, among the last
    `limit` events of each shard."""
    rows = await conn.fetch(_LEFT_OPEN, list(shards), *generation, ID_MAX, limit)
    found: dict[ShardId, set[ExecutionId]] = {}
    for row in rows:
        found.setdefault(ShardId(row["shard_id"]), set()).add(ExecutionId(row["execution_id"]))
    return found


# The close of an epoch is the last event that says the epoch before.
_CLOSED = f"""
SELECT wanted.shard_id, greatest(newest.epoch, closed.epoch::bigint) AS epoch
FROM unnest($1::integer[]) AS wanted (shard_id)
LEFT JOIN LATERAL (
    SELECT epoch_id AS epoch FROM noetl.event
    WHERE shard_id = wanted.shard_id
    ORDER BY event_id DESC
    LIMIT 1
) AS newest ON true
LEFT JOIN LATERAL (
    SELECT CASE WHEN context ->> 'barrier' ~ {_IS_EPOCH} THEN context ->> 'barrier' END AS epoch
    FROM noetl.event
    WHERE event_type = 'checkpoint.committed' AND shard_id = wanted.shard_id
    ORDER BY event_id DESC
    LIMIT 1
) AS closed ON true
"""  # noqa: S608 - the pattern is a constant


async def closed_last(conn: Connection | Pool, shards: Iterable[ShardId]) -> dict[ShardId, EpochId]:
    """The epoch that the log of each of these shards stands in; one that never had any is left
    out."""
    rows = await conn.fetch(_CLOSED, list(shards))
    return {ShardId(r["shard_id"]): EpochId(r["epoch"]) for r in rows if r["epoch"] is not None}


class Recorded(NamedTuple):
    searched: dict[ShardId, EventId]
    """Up to which event closed epochs were looked for, of each shard that was projected further."""
    executions: list[ExecutionId]
    """Whose epochs were recorded."""


# Whatever is before the watermark is in the log, and it is read in the snapshot of the watermark:
# a shard that has fewer closes than asked for is searched up to there.
_RECORD = f"""
WITH wanted AS (
    SELECT shard_id, after_id, last_projected_event_id AS watermark
    FROM unnest($1::integer[], $2::bigint[]) AS u (shard_id, after_id)
    JOIN noetl.projection_checkpoint USING (shard_id)
    WHERE last_projected_event_id > after_id
),
passed AS (
    SELECT wanted.shard_id, e.execution_id, e.event_id, e.epoch, e.created_at
    FROM wanted
    CROSS JOIN LATERAL (
        SELECT execution_id, event_id, created_at, context ->> 'barrier' AS epoch
        FROM noetl.event
        WHERE event_type = 'checkpoint.committed' AND shard_id = wanted.shard_id
          AND event_id > wanted.after_id AND event_id <= wanted.watermark
        ORDER BY event_id
        LIMIT $3
    ) AS e
),
recorded AS (
    INSERT INTO noetl.checkpoint (execution_id, shard_id, epoch, last_event_id, committed_at)
    SELECT execution_id, shard_id, epoch::bigint, event_id, created_at
    FROM passed WHERE epoch ~ {_IS_EPOCH}
    ON CONFLICT DO NOTHING
    RETURNING execution_id
)
SELECT shard_id,
       CASE WHEN count(event_id) < $3 THEN watermark ELSE max(event_id) END AS searched_to,
       (SELECT array_agg(DISTINCT execution_id) FROM recorded) AS executions
FROM wanted LEFT JOIN passed USING (shard_id)
GROUP BY shard_id, watermark
"""  # noqa: S608 - the pattern is a constant


async def record(
    conn: Connection | Pool, searched: Mapping[ShardId, EventId], *, limit: int
) -> Recorded:
    """Record the epochs that the projection has passed, up to `limit` closes of each shard."""
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
           row_number() OVER (PARTITION BY execution_id ORDER BY last_event_id DESC) AS place
    FROM noetl.checkpoint WHERE execution_id = ANY ($1::bigint[])
) AS ranked
WHERE c.execution_id = ranked.execution_id AND c.epoch = ranked.epoch AND ranked.place > $2
"""


async def prune(
    conn: Connection | Pool, execution_ids: Iterable[ExecutionId], *, keep: int
) -> None:
    """Leave these executions their newest `keep` epochs."""
    await conn.execute(_PRUNE, list(execution_ids), keep)


class Place(NamedTuple):
    """A row of noetl.checkpoint, by its key."""

    execution_id: ExecutionId
    epoch: EpochId


BEFORE_ALL = Place(ExecutionId(0), EpochId(0))

# Page by page through the key. The newest row of a shard stays, whosoever it is: it says how far
# the shard is covered.
_FORGET_ENDED = """
WITH page AS (
    SELECT execution_id, epoch, shard_id, last_event_id FROM noetl.checkpoint
    WHERE (execution_id, epoch) > ($1, $2)
    ORDER BY execution_id, epoch
    LIMIT $3
),
gone AS (
    DELETE FROM noetl.checkpoint AS c
    USING page JOIN noetl.execution AS x ON x.execution_id = page.execution_id
    WHERE c.execution_id = page.execution_id AND c.epoch = page.epoch
      AND x.status IN ('COMPLETED', 'FAILED', 'CANCELLED')
      AND page.last_event_id < (
          SELECT max(last_event_id) FROM noetl.checkpoint WHERE shard_id = page.shard_id
      )
    RETURNING 1
)
SELECT execution_id, epoch, (SELECT count(*) FROM page) AS looked_at,
       (SELECT count(*) FROM gone) AS forgotten
FROM page ORDER BY execution_id DESC, epoch DESC LIMIT 1
"""


class Forgotten(NamedTuple):
    row_count: int
    upto: Place
    """Where the next page begins."""


async def forget_ended(conn: Connection | Pool, after: Place, *, limit: int) -> Forgotten:
    """Remove the epochs of executions that have ended, looking at `limit` rows after a place."""
    row = await conn.fetchrow(_FORGET_ENDED, *after, limit)
    if row is None:
        return Forgotten(0, BEFORE_ALL)
    is_last = row["looked_at"] < limit
    upto = BEFORE_ALL if is_last else Place(row["execution_id"], row["epoch"])
    return Forgotten(row["forgotten"], upto)


# From the first event that no recorded epoch covers: that is what would be replayed. A shard in
# which nothing moved since its last epoch has no age, however long ago that was, and what has ended
# needs no epoch any more. So events are looked at from there on until one belongs to an execution
# that goes on; what is not projected may. One that moved to another shard when their count changed
# may have a newer epoch there. Executions that wait quietly are never read.
_TAIL = """
SELECT event_id, execution_id, created_at FROM noetl.event
WHERE shard_id = wanted.shard_id AND event_id > place.event_id
ORDER BY event_id
LIMIT $3
"""

_AGES = f"""
SELECT wanted.shard_id, uncovered.execution_id,
       extract(epoch FROM clock_timestamp() - uncovered.created_at) * 1000 AS age_ms,
       coalesce(uncovered.event_id - 1, passed.event_id, place.event_id) AS passed_to
FROM unnest($1::integer[], $2::bigint[]) AS wanted (shard_id, after_id)
LEFT JOIN noetl.projection_checkpoint AS p ON p.shard_id = wanted.shard_id
LEFT JOIN LATERAL (
    SELECT last_event_id FROM noetl.checkpoint
    WHERE shard_id = wanted.shard_id
    ORDER BY last_event_id DESC
    LIMIT 1
) AS newest ON true
CROSS JOIN LATERAL (
    SELECT greatest(wanted.after_id, newest.last_event_id) AS event_id
) AS place
LEFT JOIN LATERAL (
    SELECT tail.event_id, tail.execution_id, tail.created_at
    FROM ({_TAIL}) AS tail
    WHERE tail.event_id > coalesce(p.last_projected_event_id, 0)
       OR (SELECT status FROM noetl.execution WHERE execution_id = tail.execution_id)
          IN ('PENDING', 'RUNNING', 'PAUSED')
      AND NOT EXISTS (
          SELECT FROM noetl.checkpoint AS c
          WHERE c.execution_id = tail.execution_id AND c.last_event_id > tail.event_id
      )
    ORDER BY tail.event_id
    LIMIT 1
) AS uncovered ON true
LEFT JOIN LATERAL (
    SELECT max(tail.event_id) AS event_id FROM ({_TAIL}) AS tail WHERE uncovered.event_id IS NULL
) AS passed ON true
"""  # noqa: S608 - the tail is a constant


class Ages(NamedTuple):
    ages_ms: dict[ShardId, float]
    """How long work has been going on past the last closed epoch, by shard that has such work."""
    oldest: dict[ShardId, ExecutionId]
    """Whose work that is. The execution may have gone to another shard since."""
    passed: dict[ShardId, EventId]
    """Up to which event nothing goes on that no epoch covers: look from there the next time."""


async def ages(conn: Connection | Pool, passed: Mapping[ShardId, EventId], *, limit: int) -> Ages:
    """Look at up to `limit` events of each shard past a place where there was nothing before."""
    rows = await conn.fetch(_AGES, list(passed), list(passed.values()), limit)
    aged = [row for row in rows if row["age_ms"] is not None]
    return Ages(
        {ShardId(row["shard_id"]): float(row["age_ms"]) for row in aged},
        {ShardId(row["shard_id"]): ExecutionId(row["execution_id"]) for row in aged},
        {ShardId(row["shard_id"]): EventId(row["passed_to"]) for row in rows},
    )
