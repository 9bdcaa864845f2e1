"""noetl.metric: numbers that processes report, kept for a while."""

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from noetl_core.store.postgres import Connection, Pool

if TYPE_CHECKING:
    from asyncpg import Record


class Sample(NamedTuple):
    """`labels` is JSON text, over which `component` and `kind` of who reports go. Without a time it
    is now, and so is a time that is still to come.
    """

    name: str
    value: float
    labels: str = "{}"
    reported_at: datetime | None = None


_REPORT = """
INSERT INTO noetl.metric (runtime_id, name, value, labels, reported_at)
SELECT
    (SELECT runtime_id FROM noetl.runtime WHERE kind = $1 AND name = $2),
    u.name, u.value, u.labels::jsonb || jsonb_build_object('component', $2::text, 'kind', $1::text),
    least(u.reported_at, now())
FROM unnest($3::text[], $4::double precision[], $5::text[], $6::timestamptz[])
    AS u (name, value, labels, reported_at)
"""


async def report(
    conn: Connection | Pool, samples: Sequence[Sample], *, kind: str, component: str
) -> None:
    columns: list[Any] = [list(column) for column in zip(*samples, strict=True)]
    if columns:
        await conn.execute(_REPORT, kind, component, *columns)


# By what narrows it down most, off an index, from the newest on. "Equal" is said as a range of the
# index: the order is that of the index then, and not that of the ids, along which Postgres would
# walk through everybody's metrics to find those of somebody who seldom reports.
_PAGE = """
SELECT m.metric_id, m.name, m.value, m.labels, m.reported_at
FROM {asked} CROSS JOIN LATERAL (
    SELECT metric_id, name, value, labels, reported_at
    FROM noetl.metric
    WHERE ({first}metric_id) < ({value}$6) {least}
      AND ($1::text IS NULL OR name = $1)
      AND ($2::text IS NULL OR labels->>'component' = $2)
      AND ($3::text[] IS NULL OR labels->>'kind' = ANY ($3))
      AND reported_at >= coalesce($4, '-infinity'::timestamptz)
      AND reported_at < coalesce($5, 'infinity'::timestamptz)
    ORDER BY {order}metric_id DESC
    LIMIT $7
) AS m
ORDER BY m.metric_id DESC
LIMIT $7
"""


def _page_of(column: str, value: str, *, asked: str = "(SELECT) AS nothing") -> str:
    return _PAGE.format(
        asked=asked,
        first=f"{column}, ",
        value=f"{value}, ",
        least=f"AND {column} >= {value}",
        order=f"{column} DESC, ",
    )


_OF_COMPONENT = _page_of("(labels->>'component')", "$2")
_OF_NAME = _page_of("name", "$1")
_OF_KINDS = _page_of("(labels->>'kind')", "asked.kind", asked="unnest($3::text[]) AS asked (kind)")
_OF_ALL = _PAGE.format(asked="(SELECT) AS nothing", first="", value="", least="", order="")


async def newest(
    conn: Connection | Pool,
    *,
    name: str | None,
    component: str | None,
    kinds: Sequence[str] | None,
    since: datetime | None,
    until: datetime | None,
    before: int,
    limit: int,
) -> "list[Record]":
    """From the last one reported to the first, past `before`."""
    if component is not None:
        query = _OF_COMPONENT
    elif name is not None:
        query = _OF_NAME
    else:
        query = _OF_ALL if kinds is None else _OF_KINDS
    return list(await conn.fetch(query, name, component, kinds, since, until, before, limit))


# What heartbeats said last is a measurement, too: nobody has to send it twice. Of a process of ours
# they say how they went themselves, and what it uses (process/vitals.py).
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
UNION ALL
SELECT 'noetl_' || said.key, said.value::double precision,
       jsonb_build_object('component', r.name, 'kind', r.kind), r.runtime_id
FROM noetl.runtime AS r
CROSS JOIN LATERAL jsonb_each(r.runtime) AS said
WHERE r.node IS NOT NULL AND r.status = 'ready'
  AND said.key IN ('heartbeat_success_rate', 'heartbeat_latency_ms', 'process_cpu_percent',
                   'process_memory_peak_bytes')
  AND jsonb_typeof(said.value) = 'number'
"""


async def observe(conn: Connection | Pool) -> None:
    """Write down how many workers there are, how much waits, and what everybody said last."""
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
