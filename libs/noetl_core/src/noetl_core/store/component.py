"""noetl.runtime as others see it: who is registered, and processes that another system registers.

Our own processes register themselves (runtime.py) and hold a node number; those that died have lost
it and are marked as ours. Any other row came in through the gateway; it can be changed from there,
and ours cannot.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from noetl_core.domain.ids import RuntimeId
from noetl_core.store.postgres import Connection, Pool

if TYPE_CHECKING:
    from asyncpg import Record


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """What another system says of a process of its own."""

    kind: str
    name: str
    uri: str | None = None
    status: str = "ready"
    labels: Any = None
    capabilities: Any = None
    capacity: int | None = None
    runtime: Mapping[str, Any] = {}


_REGISTER = """
INSERT INTO noetl.runtime AS r (
    runtime_id, kind, name, uri, status, labels, capabilities, capacity, runtime
)
VALUES ($1, $2, $3, $4, $5, $6::jsonb, $7::jsonb, $8, $9::jsonb)
ON CONFLICT (kind, name) DO UPDATE SET
    uri = excluded.uri, status = excluded.status, labels = excluded.labels,
    capabilities = excluded.capabilities, capacity = excluded.capacity,
    runtime = excluded.runtime, heartbeat = now(), updated_at = now()
WHERE r.node IS NULL AND NOT r.is_ours
RETURNING runtime_id
"""


async def register(
    conn: Connection | Pool, runtime_id: RuntimeId, component: Component
) -> RuntimeId | None:
    """Add it, or replace what was said before. None: the name belongs to a process of ours."""
    found = await conn.fetchval(
        _REGISTER,
        runtime_id,
        component.kind,
        component.name,
        component.uri,
        component.status,
        _json(component.labels),
        _json(component.capabilities),
        component.capacity,
        _json(component.runtime),
    )
    return None if found is None else RuntimeId(found)


_IN_USE = frozenset({"running", "free"})

_HEARTBEAT = """
UPDATE noetl.runtime
SET heartbeat = now(), updated_at = now(), capacity = coalesce($4, greatest(capacity, $7)),
    status = coalesce($3, CASE status WHEN 'draining' THEN status ELSE 'ready' END),
    runtime = (coalesce(runtime, '{}') - $6::text[]) || $5::jsonb
WHERE kind = $1 AND name = $2 AND node IS NULL AND NOT is_ours
RETURNING runtime_id
"""


async def heartbeat(
    conn: Connection | Pool,
    *,
    kind: str,
    name: str,
    status: str | None = None,
    capacity: int | None = None,
    report: Mapping[str, Any],
) -> RuntimeId | None:
    """It lives, and this much of it is in use. None when it is not registered.

    Without a status, one that is about to end stays so.
    """
    outdated = _outdated(report, is_resized=capacity is not None)
    found = await conn.fetchval(
        _HEARTBEAT, kind, name, status, capacity, _json(report), outdated, _slots_at_least(report)
    )
    return None if found is None else RuntimeId(found)


def _slots_at_least(report: Mapping[str, Any]) -> int | None:
    """Who was registered with less has grown since, and need not say so."""
    return sum(report[name] for name in _IN_USE) if report.keys() >= _IN_USE else None


def _outdated(report: Mapping[str, Any], *, is_resized: bool) -> list[str]:
    """What an earlier heartbeat said and this one makes wrong: of `running` and `free` one alone
    changes the other, and so does another capacity what is free.
    """
    if report.keys() & _IN_USE:
        return sorted(_IN_USE)
    return ["free"] if is_resized else []


_DEREGISTER = """
UPDATE noetl.runtime SET status = 'offline', updated_at = now()
WHERE kind = $1 AND name = $2 AND node IS NULL AND NOT is_ours
RETURNING runtime_id
"""


async def deregister(conn: Connection | Pool, *, kind: str, name: str) -> RuntimeId | None:
    """Offline until its next heartbeat, if there is one. None when it is not registered."""
    found = await conn.fetchval(_DEREGISTER, kind, name)
    return None if found is None else RuntimeId(found)


# A process that was started again under its name leaves its old row behind, under another name
# (runtime.py), until the node number may be used again. Nobody wants to see that.
_LIST = """
SELECT runtime_id, kind, name, uri, status, labels, capabilities, capacity, runtime, heartbeat,
       created_at, extract(epoch FROM now() - heartbeat)::double precision AS heartbeat_age_seconds
FROM noetl.runtime
WHERE ($1::text[] IS NULL OR kind = ANY ($1)) AND ($2::text IS NULL OR status = $2)
  AND NOT (status = 'offline' AND name LIKE '%#' || runtime_id)
ORDER BY status = 'offline', kind, name
LIMIT $3
"""


async def registered(
    conn: Connection | Pool,
    *,
    kinds: list[str] | None = None,
    status: str | None = None,
    limit: int,
) -> "list[Record]":
    """Who is there, then who was a moment ago; JSON columns as text."""
    return list(await conn.fetch(_LIST, kinds, status, limit))


_OURS = {"server_api": "api-gateway", "worker_pool": "worker"}


def kinds_meant(kind: str) -> list[str]:
    """Whoever asks for servers or worker pools by the names that other systems register under
    means ours, too.
    """
    return [kind, _OURS[kind]] if kind in _OURS else [kind]


def _json(value: Any) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()
