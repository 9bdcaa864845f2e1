"""noetl.execution_shard: who may write which shard, for how long, and under which epoch.

The epoch is the fencing token. It rises whenever a shard changes hands, and every commit of the
broker proves the epoch that it was given; so an owner that slept through its lease can do no harm.
"""

from collections.abc import Sequence
from typing import NamedTuple

from noetl_core.domain.ids import RuntimeId, ShardId
from noetl_core.store.postgres import Connection, Pool


class Claim(NamedTuple):
    """A shard that we hold, and the fencing token under which we hold it."""

    shard_id: ShardId
    epoch: int


# A shard whose owner is in the middle of a commit is locked, and skipped: the next look gets it.
_CLAIM = """
UPDATE noetl.execution_shard
SET owner_runtime_id = $2, owner_instance = $3, epoch = epoch + 1,
    leased_until = now() + make_interval(secs => $4), updated_at = now()
WHERE role = $1 AND shard_id = ANY (ARRAY(
    SELECT shard_id FROM noetl.execution_shard
    WHERE role = $1 AND (leased_until IS NULL OR leased_until < now())
    ORDER BY shard_id
    LIMIT $5
    FOR UPDATE SKIP LOCKED
))
RETURNING shard_id, epoch
"""


async def claim(
    conn: Connection | Pool,
    role: str,
    runtime_id: RuntimeId,
    *,
    instance: str,
    lease_seconds: float,
    limit: int,
) -> list[Claim]:
    """Take up to `limit` shards that nobody holds; raise their epoch to fence the last owner."""
    rows = await conn.fetch(_CLAIM, role, runtime_id, instance, lease_seconds, limit)
    return sorted(Claim(row["shard_id"], row["epoch"]) for row in rows)


# A lease that ran out is still ours as long as nobody claimed the shard: the epoch is the same.
# Rows are locked in the order of their shards, as the fence of a commit does: no deadlock.
_RENEW = """
UPDATE noetl.execution_shard
SET leased_until = now() + make_interval(secs => $3), updated_at = now()
WHERE role = $1 AND owner_runtime_id = $2 AND shard_id = ANY (ARRAY(
    SELECT shard_id FROM noetl.execution_shard
    WHERE role = $1 AND owner_runtime_id = $2
    ORDER BY shard_id
    FOR UPDATE
))
RETURNING shard_id, epoch
"""


async def renew(
    conn: Connection | Pool, role: str, runtime_id: RuntimeId, *, lease_seconds: float
) -> list[Claim]:
    """Extend what we hold; what is not in the answer is no longer ours."""
    rows = await conn.fetch(_RENEW, role, runtime_id, lease_seconds)
    return sorted(Claim(row["shard_id"], row["epoch"]) for row in rows)


_RELEASE = """
UPDATE noetl.execution_shard
SET owner_runtime_id = NULL, owner_instance = NULL, leased_until = NULL, updated_at = now()
WHERE role = $1 AND owner_runtime_id = $2 AND shard_id = ANY (ARRAY(
    SELECT shard_id FROM noetl.execution_shard
    WHERE role = $1 AND owner_runtime_id = $2 AND ($3::integer[] IS NULL OR shard_id = ANY ($3))
    ORDER BY shard_id
    FOR UPDATE
))
"""


async def release(
    conn: Connection | Pool,
    role: str,
    runtime_id: RuntimeId,
    shard_ids: Sequence[ShardId] | None = None,
) -> None:
    """Give up these shards, or all of ours: whoever looks next may claim them."""
    await conn.execute(_RELEASE, role, runtime_id, shard_ids)


_INHERIT = """
UPDATE noetl.execution_shard
SET owner_runtime_id = NULL, owner_instance = NULL, leased_until = NULL, updated_at = now()
WHERE role = $1 AND owner_instance = $3 AND owner_runtime_id <> $2
"""


async def inherit(
    conn: Connection | Pool, role: str, runtime_id: RuntimeId, *, instance: str
) -> None:
    """Free what the last process of our name held: we are its successor, so it is gone.

    Should it be alive after all, the epoch of the next claim fences it.
    """
    await conn.execute(_INHERIT, role, runtime_id, instance)


_OWNED = """
SELECT shard_id, epoch FROM noetl.execution_shard
WHERE role = $1 AND owner_runtime_id = $2 AND leased_until >= now()
ORDER BY shard_id
"""


async def owned(conn: Connection | Pool, role: str, runtime_id: RuntimeId) -> list[Claim]:
    rows = await conn.fetch(_OWNED, role, runtime_id)
    return [Claim(row["shard_id"], row["epoch"]) for row in rows]


class Share(NamedTuple):
    """How many shards the role has, how many nobody holds, and who let a lease run out."""

    total: int
    free: int
    lapsed: list[RuntimeId]


_SHARE = """
SELECT count(*) AS total,
       count(*) FILTER (WHERE leased_until IS NULL OR leased_until < now()) AS free,
       array_agg(DISTINCT owner_runtime_id)
           FILTER (WHERE owner_runtime_id IS NOT NULL AND leased_until < now()) AS lapsed
FROM noetl.execution_shard WHERE role = $1
"""


async def share(conn: Connection | Pool, role: str) -> Share:
    row = await conn.fetchrow(_SHARE, role)
    assert row is not None
    return Share(row["total"], row["free"], row["lapsed"] or [])
