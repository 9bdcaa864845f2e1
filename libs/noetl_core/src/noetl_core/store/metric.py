"""noetl.metric: numbers that processes report, kept for a while."""

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from noetl_core.store.postgres import Connection, Pool

if TYPE_CHECKING:
    from asyncpg import Record


class Sample(NamedTuple):
    """`labels` is JSON text; without a time it is now."""

    name: str
    value: float
    labels: str = "{}"
    reported_at: datetime | None = None


_REPORT = """
INSERT INTO noetl.metric (runtime_id, name, value, labels, reported_at)
SELECT
    (SELECT runtime_id FROM noetl.runtime WHERE kind = $1 AND name = $2),
    u.name, u.value, jsonb_build_object('component', $2::text, 'kind', $1::text) || u.labels::jsonb,
    coalesce(u.reported_at, now())
FROM unnest($3::text[], $4::double precision[], $5::text[], $6::timestamptz[])
    AS u (name, value, labels, reported_at)
"""


async def report(
    conn: Connection | Pool, samples: Sequence[Sample], *, kind: str, component: str
) -> None:
    columns: list[Any] = [list(column) for column in zip(*samples, strict=True)]
    if columns:
        await conn.execute(_REPORT, kind, component, *columns)


_QUERY = """
SELECT metric_id, name, value, labels, reported_at
FROM noetl.metric
WHERE ($1::text IS NULL OR name = $1)
  AND ($2::text IS NULL OR labels->>'component' = $2)
  AND ($3::text IS NULL OR labels->>'kind' = $3)
  AND reported_at >= coalesce($4, '-infinity'::timestamptz)
  AND reported_at < coalesce($5, 'infinity'::timestamptz)
  AND metric_id < $6
ORDER BY metric_id DESC
LIMIT $7
"""


async def newest(
    conn: Connection | Pool,
    *,
    name: str | None,
    component: str | None,
    kind: str | None,
    since: datetime | None,
    until: datetime | None,
    before: int,
    limit: int,
) -> "list[Record]":
    """From the last one reported to the first, past `before`."""
    return list(await conn.fetch(_QUERY, name, component, kind, since, until, before, limit))


# What the workers' heartbeats said last is a measurement, too: nobody has to send it twice.
_OBSERVE = """
INSERT INTO noetl.metric (name, value, labels, runtime_id)
SELECT 'noetl_workers_active', count(*), '{"component": "system", "kind": "system"}'::jsonb,
       NULL::bigint
FROM noetl.runtime
WHERE kind IN ('worker', 'worker_pool') AND status = 'ready'
UNION ALL
SELECT 'noetl_queue_' || wanted.status, count(c.status),
       '{"component": "system", "kind": "system"}'::jsonb, NULL::bigint
FROM unnest(ARRAY['pending', 'leased', 'held']) AS wanted (status)
LEFT JOIN noetl.command AS c ON c.status = wanted.status
GROUP BY wanted.status
UNION ALL
SELECT 'noetl_worker_' || said.key, said.value::double precision,
       jsonb_build_object('component', r.name, 'kind', r.kind), r.runtime_id
FROM noetl.runtime AS r
CROSS JOIN LATERAL jsonb_each(r.runtime) AS said
WHERE r.kind IN ('worker', 'worker_pool') AND r.status = 'ready'
  AND said.key IN ('slots', 'running', 'free', 'done', 'failed')
  AND jsonb_typeof(said.value) = 'number'
"""


async def observe(conn: Connection | Pool) -> None:
    """Write down how many workers there are, how much waits, and what each worker said last."""
    await conn.execute(_OBSERVE)


_FORGET = """
DELETE FROM noetl.metric WHERE metric_id IN (
    SELECT metric_id FROM noetl.metric
    WHERE reported_at < now() - make_interval(secs => $1)
    ORDER BY reported_at LIMIT $2
)
RETURNING 1
"""


async def forget(conn: Connection | Pool, *, older_seconds: float, limit: int) -> int:
    return len(await conn.fetch(_FORGET, older_seconds, limit))
