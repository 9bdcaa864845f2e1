"""noetl.command: the queue of record. Workers lease rows; only the broker adds and removes them.

A row goes from pending to leased once: an attempt belongs to one worker for its whole life. When
its lease runs out the reaper tells the broker, which ends the attempt and issues the next one.

Leases do not wait for the disk, so a Postgres that crashes may forget the last of them: the row is
pending again while its worker runs it. The worker has it back with its next heartbeat, unless
another one was faster; then the attempt belongs to that one.

Rows are found by `= ANY (ARRAY[key])` where `= key` would say the same. The queue is mostly empty
when Postgres counts it, and a minute later it holds a hundred thousand rows. Until the next count
the planner believes that to read all of it costs nothing, and joins a handful of keys with the
whole queue. For an array there is no hash or merge join, and in sessions with QUEUE_SETTINGS there
is no reading of whole tables: what is left is the index, however many rows there are.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from noetl_core.domain.ids import CommandId, ExecutionId, ShardId, StepName, WorkerId
from noetl_core.store.postgres import Connection, Pool

QUEUE_SETTINGS = {"enable_seqscan": "off", "enable_bitmapscan": "off"}
"""For the sessions of brokers and workers, which look for rows of the queue by key. Not for those
of the reaper, which reads all of it to count it."""

CommandKey = tuple[ExecutionId, CommandId]


class Leased(NamedTuple):
    execution_id: ExecutionId
    command_id: CommandId
    shard_id: ShardId
    step: StepName
    attempt: int
    pool: str
    payload: bytes
    requires: Sequence[str] | None = None
    """What only some workers offer; None for a command that anyone can run."""

    @property
    def key(self) -> CommandKey:
        return self.execution_id, self.command_id


# A pool at a time, so that the rows come off the index in order and LIMIT stops the scan: over a
# queue of a million this reads as much as over a queue of ten. SKIP LOCKED lets two workers look at
# once and never take the same row, and makes neither wait for the other.
#
# What is meant for us is found by an index of its own and comes before what is as urgent: at the
# end of a long queue it would be found when its time is over, and then by anyone. Where there is
# enough of it, what is for anyone must be more urgent than the least of it.
_LEASE = """
WITH meant AS MATERIALIZED (
    SELECT execution_id, command_id, priority
    FROM noetl.command
    WHERE status = 'pending' AND target_worker = $1
      AND pool = ANY ($2::text[]) AND available_at <= now()
      AND (requires IS NULL OR requires <@ $5::text[])
    ORDER BY priority DESC, available_at
    LIMIT $3
    FOR UPDATE SKIP LOCKED
), picked AS MATERIALIZED (
    SELECT ready.execution_id, ready.command_id, ready.priority
    FROM unnest($2::text[]) AS wanted (pool)
    CROSS JOIN LATERAL (
        SELECT execution_id, command_id, priority
        FROM noetl.command
        WHERE status = 'pending' AND pool = wanted.pool AND available_at <= now()
          AND priority > coalesce(
              (SELECT min(priority)::bigint FROM meant HAVING count(*) >= $3), -2147483649
          )
          AND (target_worker IS NULL OR target_worker <> $1 AND target_until <= now())
          AND (requires IS NULL OR requires <@ $5::text[])
        ORDER BY priority DESC, available_at
        LIMIT $3
        FOR UPDATE SKIP LOCKED
    ) AS ready
    LIMIT $3
)
UPDATE noetl.command AS c
SET status = 'leased', worker_id = $1, last_heartbeat = now(),
    lease_until = now() + make_interval(secs => $4)
FROM (
    SELECT execution_id, command_id, priority, true AS is_meant FROM meant
    UNION ALL
    SELECT execution_id, command_id, priority, false FROM picked
    ORDER BY priority DESC, is_meant DESC
    LIMIT $3
) AS taken
WHERE c.execution_id = ANY (ARRAY[taken.execution_id])
  AND c.command_id = ANY (ARRAY[taken.command_id])
RETURNING c.execution_id, c.command_id, c.shard_id, c.step, c.attempt, c.pool, c.payload, c.requires
"""


async def lease(
    conn: Connection | Pool,
    worker_id: WorkerId,
    pools: Sequence[str],
    *,
    limit: int,
    lease_seconds: float,
    offers: Sequence[str] = (),
) -> list[Leased]:
    """Take up to `limit` commands that are ready, the most urgent of the first pool first.

    `offers`: what this worker has for them now. One that requires more is left to others.
    """
    rows = await conn.fetch(_LEASE, worker_id, pools, limit, lease_seconds, offers)
    return [Leased(*row) for row in rows]


# Without a heartbeat is what a predecessor of the same name has left, see `give_up_all`.
_HELD_BY = """
SELECT execution_id, command_id, shard_id, step, attempt, pool, payload, requires
FROM noetl.command
WHERE status = 'leased' AND worker_id = $1 AND NOT given_back AND last_heartbeat IS NOT NULL
"""


async def held_by(conn: Connection | Pool, worker_id: WorkerId) -> list[Leased]:
    """All that a worker has leased: also what it was never told of, because the answer was lost."""
    return [Leased(*row) for row in await conn.fetch(_HELD_BY, worker_id)]


# The broker may be deleting some of these rows right now. We never wait for it: it takes its rows
# in its order and we in ours, and each waiting for the other would be a deadlock. A row that it
# holds is not renewed this time but still counts as ours, because its commit may yet fail.
# A row that nobody holds is one whose lease Postgres has forgotten.
_HEARTBEAT = """
WITH mine AS MATERIALIZED (
    SELECT c.execution_id, c.command_id
    FROM unnest($2::bigint[], $3::text[]) AS held (execution_id, command_id)
    JOIN noetl.command c
        ON c.execution_id = ANY (ARRAY[held.execution_id])
        AND c.command_id = ANY (ARRAY[held.command_id])
    WHERE (c.worker_id = $1 AND NOT c.given_back) OR c.status = 'pending'
), free AS MATERIALIZED (
    SELECT c.execution_id, c.command_id
    FROM mine
    JOIN noetl.command c
        ON c.execution_id = ANY (ARRAY[mine.execution_id])
        AND c.command_id = ANY (ARRAY[mine.command_id])
    WHERE (c.worker_id = $1 AND NOT c.given_back) OR c.status = 'pending'
    FOR UPDATE OF c SKIP LOCKED
), renewed AS (
    UPDATE noetl.command c
    SET status = 'leased', worker_id = $1, last_heartbeat = now(),
        lease_until = now() + make_interval(secs => $4)
    FROM free
    WHERE c.execution_id = ANY (ARRAY[free.execution_id])
      AND c.command_id = ANY (ARRAY[free.command_id])
)
SELECT execution_id, command_id FROM mine
"""


async def heartbeat(
    conn: Connection | Pool,
    worker_id: WorkerId,
    keys: Sequence[CommandKey],
    *,
    lease_seconds: float,
) -> set[CommandKey]:
    """Renew the leases of these commands; says which of them are still ours.

    One that is missing has ended: its result was recorded, or it was cancelled or given away.
    """
    executions = [key[0] for key in keys]
    commands = [key[1] for key in keys]
    rows = await conn.fetch(_HEARTBEAT, worker_id, executions, commands, lease_seconds)
    return {(row[0], row[1]) for row in rows}


# As with a heartbeat: a row that is locked is not waited for. Its broker is about to end it, or a
# heartbeat of ours has renewed it this very moment; if it is still there afterwards, its lease runs
# out as it would have done without us.
_GIVE_BACK = """
WITH free AS MATERIALIZED (
    SELECT c.execution_id, c.command_id
    FROM unnest($2::bigint[], $3::text[]) AS held (execution_id, command_id)
    JOIN noetl.command c
        ON c.execution_id = ANY (ARRAY[held.execution_id])
        AND c.command_id = ANY (ARRAY[held.command_id])
    WHERE c.worker_id = $1
    FOR UPDATE OF c SKIP LOCKED
)
UPDATE noetl.command c
SET lease_until = now(), given_back = true
FROM free
WHERE c.execution_id = ANY (ARRAY[free.execution_id])
  AND c.command_id = ANY (ARRAY[free.command_id])
"""


async def give_back(
    conn: Connection | Pool, worker_id: WorkerId, keys: Sequence[CommandKey]
) -> None:
    """Let these leases run out now, so that the next attempts do not wait for it. Nobody died: the
    commands do not count as lost."""
    await conn.execute(_GIVE_BACK, worker_id, [key[0] for key in keys], [key[1] for key in keys])


_GIVE_UP_ALL = """
WITH free AS MATERIALIZED (
    SELECT execution_id, command_id
    FROM noetl.command
    WHERE status = 'leased' AND worker_id = $1
    FOR UPDATE SKIP LOCKED
)
UPDATE noetl.command c
SET lease_until = now(), last_heartbeat = NULL
FROM free
WHERE c.execution_id = ANY (ARRAY[free.execution_id])
  AND c.command_id = ANY (ARRAY[free.command_id])
"""


async def give_up_all(conn: Connection | Pool, worker_id: WorkerId) -> None:
    """For a worker that starts: what its predecessor of the same name held, it holds no more.

    The rows bear its name until the broker has ended their attempts; that nobody was heard of tells
    them from what it leases itself.
    """
    await conn.execute(_GIVE_UP_ALL, worker_id)


# Leases that have run out already are the reaper's: they may be those of a predecessor that died.
_GIVE_BACK_STRAYS = """
WITH strays AS MATERIALIZED (
    SELECT c.execution_id, c.command_id
    FROM noetl.command c
    WHERE c.status = 'leased' AND c.worker_id = $1 AND NOT c.given_back
      AND c.lease_until > now()
      AND c.lease_until < $4::timestamptz + make_interval(secs => $5)
      AND c.last_heartbeat < $4
      AND (c.execution_id, c.command_id) NOT IN (
          SELECT execution_id, command_id
          FROM unnest($2::bigint[], $3::text[]) AS held (execution_id, command_id)
      )
    FOR UPDATE SKIP LOCKED
), given AS (
    UPDATE noetl.command c
    SET lease_until = now(), given_back = true
    FROM strays
    WHERE c.execution_id = ANY (ARRAY[strays.execution_id])
      AND c.command_id = ANY (ARRAY[strays.command_id])
)
SELECT now(), (SELECT count(*) FROM strays)
"""


class Strays(NamedTuple):
    looked_at: datetime
    """By the clock of the database."""
    given_back: int


async def give_back_strays(
    conn: Connection | Pool,
    worker_id: WorkerId,
    held: Sequence[CommandKey],
    *,
    leased_before: datetime | None,
    lease_seconds: float,
) -> Strays:
    """Give back what is leased to this worker without its knowing: the answer to a lease was lost.

    Only what was leased before that moment, or nothing; the answer to a later lease may still be on
    its way.
    """
    executions, commands = [key[0] for key in held], [key[1] for key in held]
    row = await conn.fetchrow(
        _GIVE_BACK_STRAYS, worker_id, executions, commands, leased_before, lease_seconds
    )
    assert row is not None
    return Strays(row[0], row[1])


_LEAVE_TO_OTHERS = """
UPDATE noetl.command c
SET target_worker = NULL, target_until = NULL
FROM (
    SELECT execution_id, command_id FROM noetl.command
    WHERE status = 'pending' AND target_worker = $1
    FOR UPDATE SKIP LOCKED
) AS meant
WHERE c.execution_id = ANY (ARRAY[meant.execution_id])
  AND c.command_id = ANY (ARRAY[meant.command_id])
"""


async def leave_to_others(conn: Connection | Pool, worker_id: WorkerId) -> None:
    """For a worker that stops: nobody shall wait for it in vain."""
    await conn.execute(_LEAVE_TO_OTHERS, worker_id)


_NEXT_AVAILABLE = """
SELECT extract(epoch FROM min(available_at) - now())::double precision
FROM noetl.command
WHERE status = 'pending' AND pool = ANY ($1::text[])
  AND available_at > now() AND available_at <= now() + make_interval(secs => $2)
"""


async def next_available(
    conn: Connection | Pool, pools: Sequence[str], *, within_seconds: float
) -> float | None:
    """Seconds until a delayed command becomes ready, if one does within that time."""
    seconds: float | None = await conn.fetchval(_NEXT_AVAILABLE, pools, within_seconds)
    return seconds


class ExpiredLease(NamedTuple):
    execution_id: ExecutionId
    command_id: CommandId
    shard_id: ShardId
    step: StepName
    attempt: int
    worker_id: WorkerId
    overdue_seconds: float


# The shard by the count of this moment: that is whose broker is told. The first of each shard come
# before the second of any, so that one shard with very many hides nothing of another.
_EXPIRED = """
SELECT execution_id, command_id, shard_id, step, attempt, worker_id,
       extract(epoch FROM now() - lease_until)::double precision
FROM (
    SELECT c.execution_id, c.command_id, c.shard_id, c.step, c.attempt, c.worker_id, c.lease_until,
           s.value::integer AS shard_count,
           row_number() OVER (
               PARTITION BY noetl.vnode(c.execution_id) % s.value::integer
               ORDER BY c.lease_until, c.execution_id, c.command_id
           ) AS place
    FROM noetl.command AS c
    JOIN noetl.setting AS s ON s.name = 'shard_count'
    WHERE c.status = 'leased' AND c.lease_until < now() - make_interval(secs => $2)
) AS expired
WHERE place <= greatest(1, $1::integer / shard_count)
ORDER BY place, lease_until
LIMIT $1
"""


async def expired(
    conn: Connection | Pool, *, limit: int, grace_seconds: float = 0.0
) -> list[ExpiredLease]:
    """Leases that ran out more than the grace ago: of each shard the oldest, up to its share."""
    return [ExpiredLease(*row) for row in await conn.fetch(_EXPIRED, limit, grace_seconds)]


_DEPTH = "SELECT pool, status, count(*) FROM noetl.command GROUP BY pool, status"


async def depth(conn: Connection | Pool) -> dict[tuple[str, str], int]:
    """How many commands are open, by pool and status."""
    return {(row[0], row[1]): row[2] for row in await conn.fetch(_DEPTH)}
