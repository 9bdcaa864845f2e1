"""noetl.execution_shard: who may write which shard, for how long, and under which epoch.

The epoch is the fencing token. It rises whenever a shard changes hands, and every commit of the
broker proves the epoch that it was given; so an owner that slept through its lease can do no harm.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from noetl_core.domain.ids import RuntimeId, ShardId
from noetl_core.store.postgres import Connection, Pool

ROLES = ("broker", "projection")


class Claim(NamedTuple):
    """A shard that we hold, and the fencing token under which we hold it."""

    shard_id: ShardId
    epoch: int


RESERVED_SECONDS = 2.0
"""How long a shard that was handed over waits for the one it was meant for."""

# A shard whose owner is in the middle of a commit is locked, and skipped: the next look gets it.
_CLAIM = """
UPDATE noetl.execution_shard
SET owner_runtime_id = $2, owner_instance = $3, epoch = epoch + 1, wanted_runtime_id = NULL,
    leased_until = now() + make_interval(secs => $4), updated_at = now()
WHERE role = $1 AND shard_id = ANY (ARRAY(
    SELECT shard_id FROM noetl.execution_shard
    WHERE role = $1 AND retired_at IS NULL AND (leased_until IS NULL OR leased_until < now())
      AND ($7::integer[] IS NULL OR shard_id = ANY ($7))
      AND (
          wanted_runtime_id IS NULL OR wanted_runtime_id = $2
          OR leased_until IS NOT NULL OR updated_at < now() - make_interval(secs => $6)
      )
    ORDER BY (wanted_runtime_id IS NOT NULL AND wanted_runtime_id = $2) DESC, shard_id
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
    of: Sequence[ShardId] | None = None,
) -> list[Claim]:
    """Take up to `limit` shards that nobody holds; raise their epoch to fence the last owner."""
    rows = await conn.fetch(
        _CLAIM, role, runtime_id, instance, lease_seconds, limit, RESERVED_SECONDS, of
    )
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
WHERE role = $1 AND owner_instance = $3 AND owner_runtime_id <> $2 AND shard_id = ANY (ARRAY(
    SELECT shard_id FROM noetl.execution_shard
    WHERE role = $1 AND owner_instance = $3 AND owner_runtime_id <> $2
    ORDER BY shard_id
    FOR UPDATE
))
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


class ShardRow(NamedTuple):
    shard_id: ShardId
    epoch: int
    owner: RuntimeId | None
    is_leased: bool
    """False: nobody holds it, or its owner let the lease run out."""
    wanted: RuntimeId | None
    """Who shall have it next."""
    is_leaving: bool
    """Beyond the count: it only passes on what still comes to it."""


_LOOK = """
SELECT shard_id, epoch, owner_runtime_id, coalesce(leased_until >= now(), false) AS is_leased,
       wanted_runtime_id,
       shard_id >= (SELECT value::integer FROM noetl.setting WHERE name = 'shard_count')
FROM noetl.execution_shard
WHERE role = $1 AND retired_at IS NULL
ORDER BY shard_id
"""


async def look(conn: Connection | Pool, role: str) -> list[ShardRow]:
    """Every shard of the role, as it is now."""
    return [ShardRow(*row) for row in await conn.fetch(_LOOK, role)]


def parted(rows: Sequence[ShardRow]) -> tuple[list[ShardRow], list[ShardRow]]:
    """Those that have work, and those that are leaving. Each kind is shared by itself: a fair share
    of both together may be nothing but work for one owner, and none for another."""
    return [r for r in rows if not r.is_leaving], [r for r in rows if r.is_leaving]


_WANT = """
UPDATE noetl.execution_shard AS s SET wanted_runtime_id = u.wanted
FROM unnest($2::integer[], $3::bigint[]) AS u (shard_id, wanted)
WHERE s.role = $1 AND s.shard_id = u.shard_id AND s.shard_id = ANY (ARRAY(
    SELECT shard_id FROM noetl.execution_shard
    WHERE role = $1 AND shard_id = ANY ($2::integer[])
    ORDER BY shard_id
    FOR UPDATE
))
"""


async def want(
    conn: Connection | Pool, role: str, wishes: Mapping[ShardId, RuntimeId | None]
) -> None:
    """Say who shall have these shards next: the owner lets go, the other one claims."""
    await conn.execute(_WANT, role, list(wishes), list(wishes.values()))


# Both roles, each in the order in which every commit locks its shards: this waits for the commits
# under way, and those that come wait for us.
_LOCK_ALL = """
SELECT shard_id FROM noetl.execution_shard
WHERE role = $1
ORDER BY shard_id
FOR UPDATE
"""

_FENCE_ALL = """
UPDATE noetl.execution_shard
SET epoch = epoch + 1, owner_runtime_id = NULL, owner_instance = NULL, leased_until = NULL,
    wanted_runtime_id = NULL, updated_at = now(),
    retired_at = CASE WHEN shard_id < $1 THEN NULL ELSE retired_at END
"""

_ADD = """
INSERT INTO noetl.execution_shard (role, shard_id)
SELECT role, shard_id
FROM unnest($2::text[]) AS role CROSS JOIN generate_series(0, $1::integer - 1) AS shard_id
ON CONFLICT DO NOTHING
"""


async def lock_all(conn: Connection) -> list[ShardId]:
    """Nobody commits anything to any shard until our transaction is over."""
    shards: set[ShardId] = set()
    for role in ROLES:
        shards.update(row["shard_id"] for row in await conn.fetch(_LOCK_ALL, role))
    return sorted(shards)


async def begin_anew(conn: Connection, *, shard_count: int) -> None:
    """Take every shard from its owner, and see that there are so many. Call `lock_all` before."""
    await conn.execute(_FENCE_ALL, shard_count)
    await conn.execute(_ADD, shard_count, list(ROLES))


# What still names a shard beyond the count: events that are not projected yet, letters, and the
# commands whose workers will report there. Locked in the order of `lock_all`.
_RETIRE = """
WITH quiet AS MATERIALIZED (
    SELECT s.role, s.shard_id
    FROM noetl.execution_shard AS s
    WHERE s.retired_at IS NULL
      AND s.shard_id >= (SELECT value::integer FROM noetl.setting WHERE name = 'shard_count')
      AND NOT EXISTS (SELECT FROM noetl.inbox AS i WHERE i.shard_id = s.shard_id)
      AND NOT EXISTS (SELECT FROM noetl.command AS c WHERE c.shard_id = s.shard_id)
      AND NOT EXISTS (
          SELECT FROM noetl.event AS e
          WHERE e.shard_id = s.shard_id AND e.event_id > coalesce((
              SELECT last_projected_event_id FROM noetl.projection_checkpoint
              WHERE shard_id = s.shard_id
          ), 0)
      )
      AND (SELECT max(switched_at) FROM noetl.resize) < now() - make_interval(secs => $1)
    ORDER BY s.role, s.shard_id
    FOR UPDATE OF s
)
UPDATE noetl.execution_shard AS s
SET retired_at = now(), epoch = epoch + 1, owner_runtime_id = NULL, owner_instance = NULL,
    leased_until = NULL, wanted_runtime_id = NULL, updated_at = now()
FROM quiet
WHERE s.role = quiet.role AND s.shard_id = quiet.shard_id
RETURNING s.role, s.shard_id
"""


async def retire(conn: Connection | Pool, *, quiet_seconds: float) -> list[ShardId]:
    """Set aside the shards beyond the count that nothing can be under way to any more."""
    rows = await conn.fetch(_RETIRE, quiet_seconds)
    return sorted({ShardId(row["shard_id"]) for row in rows})
