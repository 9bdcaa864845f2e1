"""noetl.leader: roles that only one process at a time may play, held by a lease."""

from noetl_core.domain.ids import RuntimeId
from noetl_core.store.postgres import Connection, Pool

_ACQUIRE = """
INSERT INTO noetl.leader AS held (role, owner_runtime_id, epoch, leased_until)
VALUES ($1, $2, 1, now() + make_interval(secs => $3))
ON CONFLICT (role) DO UPDATE SET
    owner_runtime_id = excluded.owner_runtime_id,
    epoch = held.epoch
        + (held.owner_runtime_id IS DISTINCT FROM excluded.owner_runtime_id)::integer,
    leased_until = excluded.leased_until
WHERE held.owner_runtime_id = excluded.owner_runtime_id
   OR held.leased_until IS NULL
   OR held.leased_until < now()
RETURNING epoch
"""


async def acquire(
    conn: Connection | Pool, role: str, runtime_id: RuntimeId, *, lease_seconds: float
) -> int | None:
    """Take or renew the role; its epoch rises with every change of owner. None: another has it."""
    epoch = await conn.fetchval(_ACQUIRE, role, runtime_id, lease_seconds)
    return None if epoch is None else int(epoch)


_RELEASE = """
UPDATE noetl.leader SET owner_runtime_id = NULL, leased_until = NULL
WHERE role = $1 AND owner_runtime_id = $2
"""


async def release(conn: Connection | Pool, role: str, runtime_id: RuntimeId) -> None:
    await conn.execute(_RELEASE, role, runtime_id)


# `runtime.register` gave its row another name when we took ours.
_INHERIT = """
UPDATE noetl.leader SET owner_runtime_id = NULL, leased_until = NULL
WHERE role = $1 AND owner_runtime_id IN (
    SELECT runtime_id FROM noetl.runtime WHERE kind = $2 AND name = $3 || '#' || runtime_id
)
"""


async def inherit(conn: Connection | Pool, role: str, *, kind: str, name: str) -> None:
    """Free what the last process of our name played: we are its successor, so it is gone."""
    await conn.execute(_INHERIT, role, kind, name)
