"""noetl.runtime: every living process, and the snowflake node number that it leases.

A node number belongs to a row, and a row belongs to a process for NODE_LEASE_SECONDS after its last
heartbeat. A process that says goodbye is marked offline and keeps the number for that long, too:
the next holder may run on a machine whose clock is behind, and would mint the same ids again.

A row outlives its number: who died is shown as offline until the shard-manager forgets it. Then it
is marked as ours, because a row without a number is otherwise another system's (component.py).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from noetl_core.domain.errors import RetryableError
from noetl_core.domain.ids import RuntimeId, worker_id_of
from noetl_core.domain.workers import POOL_LABEL, TOOL_SLOTS_LABEL, LiveWorker, offers_of
from noetl_core.store.postgres import Connection, Pool

NODE_LEASE_SECONDS = 60.0
LIVE_SECONDS = 15.0
"""Who was heard of so lately lives; of one that reports `heartbeat_interval_seconds`, three of
those if that is longer (noetl.silence_allowed)."""

_LOCK = "SELECT pg_advisory_xact_lock(hashtext('noetl.runtime.node'))"

# Its successor took the name, so nobody would be shown by it.
_FORGET = """
DELETE FROM noetl.runtime
WHERE node IS NOT NULL AND heartbeat < now() - make_interval(secs => $1)
  AND name LIKE '%#' || runtime_id
"""

_FREE = """
UPDATE noetl.runtime SET node = NULL, is_ours = true, status = 'offline', updated_at = now()
WHERE node IS NOT NULL AND heartbeat < now() - make_interval(secs => $1)
"""

# The last process of this name has no more say, but its node number stays taken for a while.
_SUPERSEDE = """
UPDATE noetl.runtime
SET name = name || '#' || runtime_id, status = 'offline', updated_at = now()
WHERE kind = $1 AND name = $2 AND runtime_id IS DISTINCT FROM $3
"""

_FREE_NODE = """
SELECT node FROM generate_series(0, 1023) AS node
WHERE NOT EXISTS (SELECT 1 FROM noetl.runtime AS taken WHERE taken.node = node.node)
ORDER BY node LIMIT 1
"""

_INSERT = """
INSERT INTO noetl.runtime (
    runtime_id, name, kind, uri, node, labels, capabilities, capacity, runtime
)
VALUES ($1, $2, $3, $4, $5, $6::jsonb, $7::jsonb, $8, $9::jsonb)
ON CONFLICT (runtime_id) DO UPDATE SET
    name = excluded.name, uri = excluded.uri, node = excluded.node, labels = excluded.labels,
    capabilities = excluded.capabilities, capacity = excluded.capacity,
    runtime = excluded.runtime, is_ours = false, status = 'ready', heartbeat = now(),
    updated_at = now()
"""


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says about itself."""

    name: str
    kind: str
    uri: str | None = None
    labels: Mapping[str, Any] = {}
    capabilities: Sequence[str] = ()
    capacity: int | None = None
    process: Mapping[str, Any] = {}
    """Where it runs, and as what: pid, hostname, type."""


async def register(
    conn: Connection,
    registration: Registration,
    runtime_id_of: Callable[[int], int],
    *,
    runtime_id: RuntimeId | None = None,
) -> tuple[RuntimeId, int]:
    """Lease the smallest free node number. Must run inside a transaction.

    `runtime_id_of(node)` mints the id of a new row; a process that lost its row, or the number in
    it, passes its own.
    """
    await conn.execute(_LOCK)
    await conn.execute(_FORGET, NODE_LEASE_SECONDS)
    await conn.execute(_FREE, NODE_LEASE_SECONDS)
    await conn.execute(_SUPERSEDE, registration.kind, registration.name, runtime_id)
    node = await conn.fetchval(_FREE_NODE)
    if node is None:
        raise RetryableError("all 1024 node numbers are leased")
    identity = RuntimeId(runtime_id_of(node)) if runtime_id is None else runtime_id
    await conn.execute(
        _INSERT,
        identity,
        registration.name,
        registration.kind,
        registration.uri,
        node,
        msgspec.json.encode(registration.labels).decode(),
        msgspec.json.encode(registration.capabilities).decode(),
        registration.capacity,
        msgspec.json.encode(registration.process).decode(),
    )
    return identity, node


# What is reported goes over what was said before; the rest of it (pid, hostname) stays. Who has no
# number any more must register again.
_HEARTBEAT = """
UPDATE noetl.runtime
SET heartbeat = now(), updated_at = now(),
    status = CASE WHEN name = $2 THEN 'ready' ELSE status END,
    capacity = coalesce(($3::jsonb ->> 'slots')::integer, capacity),
    runtime = coalesce(coalesce(runtime, '{}') || $3::jsonb, runtime)
WHERE runtime_id = $1 AND node IS NOT NULL
RETURNING node, name
"""


class Beat(NamedTuple):
    node: int
    name: str


async def heartbeat(
    conn: Connection | Pool,
    runtime_id: RuntimeId,
    *,
    name: str,
    report: Mapping[str, Any] | None = None,
) -> Beat | None:
    """Renew the lease; None when the number is gone. Another name means that a successor took it.

    `report` is what changes from beat to beat: how much of the capacity is in use. Its `slots` are
    the capacity.
    """
    said = None if report is None else msgspec.json.encode(report).decode()
    row = await conn.fetchrow(_HEARTBEAT, runtime_id, name, said)
    return None if row is None else Beat(row["node"], row["name"])


_OFFLINE = """
UPDATE noetl.runtime SET status = 'offline', updated_at = now()
WHERE runtime_id = ANY ($1::bigint[]) AND status <> 'offline'
"""


async def mark_offline(conn: Connection | Pool, runtime_ids: Sequence[RuntimeId]) -> None:
    """Not counted as alive until the next heartbeat, if there is one."""
    await conn.execute(_OFFLINE, runtime_ids)


_LIVE_WORKERS = """
SELECT name, labels, capabilities, capacity FROM noetl.runtime
WHERE kind = 'worker' AND status = 'ready'
  AND heartbeat > now() - noetl.silence_allowed(runtime, $1)
ORDER BY name
"""


async def live_workers(
    conn: Connection | Pool, *, live_seconds: float = LIVE_SECONDS
) -> list[LiveWorker]:
    return [_live_worker(row) for row in await conn.fetch(_LIVE_WORKERS, live_seconds)]


def _live_worker(row: Any) -> LiveWorker:
    """The label `pool` lists the pools it serves; capabilities are the kinds of its tools."""
    labels = _labels(row["labels"])
    kinds = _json(row["capabilities"])
    slots = labels.pop(TOOL_SLOTS_LABEL, "")
    return LiveWorker(
        worker_id=worker_id_of(row["name"]),
        pools=frozenset(labels.pop(POOL_LABEL, "").split(",")),
        offers=offers_of(labels, map(str, kinds) if isinstance(kinds, list) else ()),
        capacity=max(1, row["capacity"] or 1),
        limited=frozenset(each.partition("=")[0] for each in slots.split(",") if each),
    )


def _labels(text: str | None) -> dict[str, str]:
    """Whoever registers over HTTP may have written a list, or anything else."""
    said = _json(text)
    if isinstance(said, list):
        return {str(name): "true" for name in said}
    return {name: str(value) for name, value in said.items()} if isinstance(said, dict) else {}


def _json(text: str | None) -> Any:
    return None if text is None else msgspec.json.decode(text)


_LIVE_COUNT = """
SELECT count(*) FROM noetl.runtime
WHERE kind = $1 AND node IS NOT NULL
  AND status = 'ready' AND heartbeat > now() - noetl.silence_allowed(runtime, $2)
"""


async def live_count(
    conn: Connection | Pool, kind: str, *, live_seconds: float = LIVE_SECONDS
) -> int:
    return int(await conn.fetchval(_LIVE_COUNT, kind, live_seconds))
