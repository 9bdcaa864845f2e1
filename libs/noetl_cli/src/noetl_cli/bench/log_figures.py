"""Figures read from the log: how long things took, by the clock of the database."""

import asyncpg
import msgspec

from noetl_core.domain.snowflake import minted_at_ms

_COUNT = "SELECT count(*) FROM noetl.event WHERE execution_id = ANY ($1::bigint[])"

_SPAN = """
SELECT extract(epoch FROM max(created_at) - min(created_at))::float8
FROM noetl.event WHERE execution_id = ANY ($1::bigint[])
"""

# From the commit that issued a command to the one that recorded its end.
_TASKS = """
SELECT extract(epoch FROM ended.created_at - issued.created_at)::float8 * 1000
FROM noetl.event AS issued
JOIN noetl.event AS ended USING (execution_id, command_id)
WHERE issued.execution_id = ANY ($1::bigint[])
  AND issued.event_type = 'command.issued' AND ended.event_type = 'call.done'
"""

# From entering a step to entering the one after it: everything a step costs in a row of them.
_STEPS = """
SELECT ms FROM (
    SELECT extract(epoch FROM lead(created_at) OVER w - created_at)::float8 * 1000 AS ms
    FROM noetl.event
    WHERE execution_id = ANY ($1::bigint[])
      AND event_type IN ('step.enter', 'execution.completed')
    WINDOW w AS (PARTITION BY execution_id ORDER BY event_id)
) AS steps WHERE ms IS NOT NULL
"""

_ENDS = """
SELECT execution_id, extract(epoch FROM created_at)::float8 * 1000 AS ended_ms
FROM noetl.event
WHERE execution_id = ANY ($1::bigint[]) AND event_type = 'execution.completed'
"""


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    p50_ms: float
    p99_ms: float


def percentiles(milliseconds: list[float]) -> Percentiles:
    ordered = sorted(milliseconds)
    return Percentiles(p50_ms=_at(ordered, 0.50), p99_ms=_at(ordered, 0.99))


def _at(ordered: list[float], share: float) -> float:
    return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 3) if ordered else 0.0


async def event_count(conn: asyncpg.Connection, execution_ids: list[int]) -> int:
    return int(await conn.fetchval(_COUNT, execution_ids))


async def span_seconds(conn: asyncpg.Connection, execution_ids: list[int]) -> float:
    return float(await conn.fetchval(_SPAN, execution_ids))


async def task_times(conn: asyncpg.Connection, execution_ids: list[int]) -> list[float]:
    return [row[0] for row in await conn.fetch(_TASKS, execution_ids)]


async def step_times(conn: asyncpg.Connection, execution_ids: list[int]) -> list[float]:
    return [row[0] for row in await conn.fetch(_STEPS, execution_ids)]


async def execution_times(conn: asyncpg.Connection, execution_ids: list[int]) -> list[float]:
    """From the acceptance of the request (its id was made then) to the end of the execution."""
    rows = await conn.fetch(_ENDS, execution_ids)
    return [row["ended_ms"] - minted_at_ms(row["execution_id"]) for row in rows]
