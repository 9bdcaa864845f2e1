"""The shape of the running system: which shards there are, who owns them, who is alive.

What owners do with their own rows is in execution_shard.py and runtime.py; this is what the
shard-manager does with everyone's.
"""

import math
from typing import TYPE_CHECKING

from noetl_core.domain.ids import RuntimeId
from noetl_core.store.postgres import Connection, Pool
from noetl_core.store.runtime import LIVE_SECONDS
from noetl_core.wire.topology import RuntimeMember, ShardOwnership, Topology

if TYPE_CHECKING:
    from asyncpg import Record

_ENSURE_SHARDS = """
INSERT INTO noetl.execution_shard (role, shard_id)
SELECT role, shard_id
FROM unnest(ARRAY['broker', 'projection']) AS role
CROSS JOIN noetl.setting AS s
CROSS JOIN LATERAL generate_series(0, s.value::integer - 1) AS shard_id
WHERE s.name = 'shard_count'
ON CONFLICT DO NOTHING
RETURNING shard_id
"""


async def ensure_shards(conn: Connection | Pool) -> int:
    """Give every shard of the shard count a row for each role; says how many were missing."""
    return len(await conn.fetch(_ENSURE_SHARDS))


_MARK_STALE = """
UPDATE noetl.runtime SET status = 'offline', updated_at = now()
WHERE status <> 'offline' AND heartbeat < now() - noetl.silence_allowed(runtime, $1)
  AND extract(epoch FROM noetl.silence_allowed(runtime, $1)) < $2::double precision
RETURNING kind, name, status
"""


async def mark_stale(
    conn: Connection | Pool, *, silent_seconds: float, heard_seconds: float = math.inf
) -> list[RuntimeMember]:
    """Who has not been heard of for that long is offline, until its next heartbeat.

    `heard_seconds`: for so long everybody who lives could be heard.
    """
    rows = await conn.fetch(_MARK_STALE, silent_seconds, heard_seconds)
    return [_member(row) for row in rows]


_FORGET = """
DELETE FROM noetl.runtime
WHERE status = 'offline' AND heartbeat < now() - make_interval(secs => $1)
RETURNING kind, name, status
"""


async def forget_offline(conn: Connection | Pool, *, silent_seconds: float) -> list[RuntimeMember]:
    """Remove the rows of processes that have been gone for that long."""
    return [_member(row) for row in await conn.fetch(_FORGET, silent_seconds)]


_SHARDS = """
SELECT role, shard_id, epoch, CASE WHEN leased_until >= now() THEN owner_instance END AS instance
FROM noetl.execution_shard
WHERE retired_at IS NULL
ORDER BY role, shard_id
"""

# Whoever has no node number is a process of another system (component.py), or dead.
_LIVING = """
SELECT runtime_id FROM noetl.runtime
WHERE kind = $1 AND node IS NOT NULL
  AND status = 'ready' AND heartbeat > now() - noetl.silence_allowed(runtime, $2)
"""


async def living(conn: Connection | Pool, *, kind: str) -> list[RuntimeId]:
    """Who can be given shards."""
    rows = await conn.fetch(_LIVING, kind, LIVE_SECONDS)
    return [RuntimeId(row["runtime_id"]) for row in rows]


# The lag is that of now, not of the last batch: an idle shard has none, and that of one whose
# projection hangs grows.
_STANDING = """
SELECT s.role, s.shard_id, s.epoch,
       CASE WHEN s.leased_until >= now() THEN s.owner_instance END AS instance,
       s.leased_until,
       CASE WHEN s.role = 'projection' THEN greatest(0, behind.ms)::bigint END AS lag_ms,
       CASE WHEN s.role = 'broker' THEN coalesce(i.waiting, 0) END AS waiting,
       s.shard_id >= c.value::integer AS is_leaving
FROM noetl.execution_shard AS s
JOIN noetl.setting AS c ON c.name = 'shard_count'
LEFT JOIN noetl.projection_checkpoint AS p USING (shard_id)
LEFT JOIN LATERAL (
    SELECT extract(epoch FROM now() - created_at) * 1000 AS ms FROM noetl.event
    WHERE s.role = 'projection' AND shard_id = s.shard_id
      AND event_id > coalesce(p.last_projected_event_id, 0)
    ORDER BY event_id
    LIMIT 1
) AS behind ON true
LEFT JOIN (SELECT shard_id, count(*) AS waiting FROM noetl.inbox GROUP BY shard_id) AS i
    USING (shard_id)
WHERE s.retired_at IS NULL
ORDER BY s.role, s.shard_id
"""


async def standing(conn: Connection | Pool) -> "list[Record]":
    """Every shard of every role with its owner, its lease, and how far it is behind."""
    return list(await conn.fetch(_STANDING))


_MEMBERS = "SELECT kind, name, status FROM noetl.runtime ORDER BY kind, name"

_SHARD_COUNT = "SELECT value::integer FROM noetl.setting WHERE name = 'shard_count'"


async def read(conn: Connection | Pool) -> Topology:
    shards = await conn.fetch(_SHARDS)
    members = await conn.fetch(_MEMBERS)
    return Topology(
        shard_count=await conn.fetchval(_SHARD_COUNT),
        shards=tuple(
            ShardOwnership(
                role=row["role"],
                shard_id=row["shard_id"],
                instance=row["instance"],
                epoch=row["epoch"],
            )
            for row in shards
        ),
        members=tuple(_member(row) for row in members),
    )


def _member(row: "Record") -> RuntimeMember:
    return RuntimeMember(kind=row["kind"], name=row["name"], status=row["status"])
