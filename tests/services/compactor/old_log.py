"""A log of an old week, as brokers and projections would have left it, put there by hand."""

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from noetl_compactor.archive import Rules
from noetl_core.blob.place import Place
from noetl_core.domain.partitions import WEEK_MS, partition_of, week_start_ms
from noetl_core.domain.snowflake import Snowflake, first_id_at
from noetl_core.process.clock import unix_ms
from noetl_core.store import partition
from noetl_core.store.postgres import Connection, Pool

NOW_MS = unix_ms()
OLD_WEEK_MS = week_start_ms(NOW_MS) - 10 * WEEK_MS
KEPT_FROM_MS = NOW_MS - 30 * 24 * 60 * 60 * 1000
WEEK = partition_of("event", start_ms=OLD_WEEK_MS).name.removeprefix("event_")
EXECUTIONS = 5
EVENTS = ("execution.started", "step.enter", "call.done", "execution.completed")

mint = Snowflake(node=7, now_ms=unix_ms).mint


def execution_id(number: int) -> int:
    return first_id_at(OLD_WEEK_MS + 1000 * number)


def rules(place: Place, **more: Any) -> Rules:
    return Rules(place, mint, KEPT_FROM_MS, **more)


async def a_week(pool: Pool) -> None:
    """The partitions of the old week. No autovacuum: a drop that meets one is left to a later turn,
    which is what a test has to arrange, not to run into."""
    for table in ("event", "result_ref"):
        made = partition_of(table, start_ms=OLD_WEEK_MS)
        outcome = await partition.ensure(pool, made)
        assert outcome == "created", (table, outcome)
        await pool.execute(f"ALTER TABLE noetl.{made.name} SET (autovacuum_enabled = false)")


_EVENT = """
INSERT INTO noetl.event (
    execution_id, event_id, event_key, shard_id, event_type, node_name, context, result, created_at
)
VALUES ($1, $2, $3, $4, $5, 'load', $6, $7, $8)
"""
_RESULT = """
INSERT INTO noetl.result_ref (
    execution_id, ref_id, step, store_tier, bytes, sha256, inline, created_at
)
VALUES ($1, $2, 'load', 'db', $3, $4, $5, $6)
"""
_EXECUTION = """
INSERT INTO noetl.execution (
    execution_id, catalog_id, path, version, shard_id, status, state, ctx, progress,
    last_event_type, last_projected_event_id, parent_execution_id, started_at, updated_at, ended_at
)
VALUES ($1, 1, 'old', 1, 0, $2, '{}', '{}', '{}', $3, $4, $5, $6, $6, $7)
"""


async def an_execution(
    pool: Pool, number: int, *, status: str = "COMPLETED", parent: int | None = None
) -> int:
    """One with four events and a result, that ended a second after it began unless it runs."""
    execution = execution_id(number)
    at = datetime.fromtimestamp((OLD_WEEK_MS + 1000 * number) / 1000, UTC)
    body = f'{{"number": {number}, "text": "ä, \\"quoted\\"\\n"}}'.encode()
    last = 0
    for offset, event_type in enumerate(EVENTS):
        last = execution + 1 + offset
        result = None
        if event_type == "call.done":
            result = f'{{"status": "ok", "reference": {{"ref_id": {last}, "type": "db"}}}}'
            digest = hashlib.sha256(body).digest()
            await pool.execute(_RESULT, execution, last, len(body), digest, body, at)
        key = f"k{offset}" if offset else "start"
        context = f'{{"note": "a \\"b\\", \\\\N {number}"}}' if offset else None
        await pool.execute(
            _EVENT, execution, last, key, number % 3, event_type, context, result, at
        )
    ended = at if status in {"COMPLETED", "FAILED", "CANCELLED"} else None
    await pool.execute(_EXECUTION, execution, status, EVENTS[-1], last, parent, at, ended)
    return execution


async def an_old_log(pool: Pool) -> dict[str, list[Any]]:
    await a_week(pool)
    for number in range(EXECUTIONS):
        await an_execution(pool, number)
    return {table: await rows_of(pool, table) for table in ("event", "result_ref")}


async def goes_on(pool: Pool | Connection, execution: int) -> None:
    """One more event, as after a retry; the projection has not come to it yet."""
    event_id = mint()  # after all that are there
    await pool.execute(
        _EVENT,
        *(execution, event_id, f"more {event_id}", 0, "execution.retried", None, None),
        datetime.now(UTC),
    )


async def rows_of(pool: Pool, table: str) -> list[Any]:
    key = {"event": "event_id", "result_ref": "ref_id"}[table]
    query = f"SELECT * FROM noetl.{table} ORDER BY execution_id, {key}"
    return [tuple(row) for row in await pool.fetch(query)]


async def tables(pool: Pool) -> set[str]:
    rows = await pool.fetch(
        "SELECT relname FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace"
        " WHERE nspname = 'noetl' AND relkind = 'r' AND relname ~ '^(event|result_ref)_'"
    )
    return {row["relname"] for row in rows}


Crash = Callable[[str], None]


def dies_at(step: str, *, times: int = 1) -> Crash:
    """What `Rules.after` may be: the process is gone after that line of the protocol."""
    met = 0

    def after(line: str) -> None:
        nonlocal met
        if line == step:
            met += 1
            if met == times:
                raise DiedError(step)

    return after


class DiedError(Exception):
    """The process is no more."""


_MANY_EVENTS = """
INSERT INTO noetl.event (execution_id, event_id, event_key, shard_id, event_type, context)
SELECT $1 + x * 4096::bigint, $1 + x * 4096::bigint + n, 'k' || n, x % 16, 'call.done', '{"a": 1}'
FROM generate_series(1, $2::integer) AS x, generate_series(1, $3::integer) AS n
"""
_THEIR_RESULTS = """
INSERT INTO noetl.result_ref (execution_id, ref_id, step, store_tier, bytes, inline)
SELECT execution_id, event_id, 'load', 'db', 64, sha512(event_id::text::bytea)
FROM noetl.event WHERE event_id % 3 = 0
"""
_THEIR_EXECUTIONS = """
INSERT INTO noetl.execution (
    execution_id, catalog_id, path, version, shard_id, status, state, ctx, progress,
    last_event_type, last_projected_event_id, started_at, updated_at, ended_at
)
SELECT execution_id, 1, 'old', 1, 0, 'COMPLETED', '{}', '{}', '{}', 'execution.completed',
       max(event_id), $1, $1, $1
FROM noetl.event GROUP BY execution_id
"""


async def a_large_week(pool: Pool, *, executions: int, events: int) -> None:
    """Ended executions with so many events each, on sixteen shards; the planner knows of them."""
    ended = datetime.fromtimestamp(OLD_WEEK_MS / 1000, UTC)
    await pool.execute(_MANY_EVENTS, first_id_at(OLD_WEEK_MS), executions, events, timeout=300)
    await pool.execute(_THEIR_RESULTS, timeout=300)
    await pool.execute(_THEIR_EXECUTIONS, ended, timeout=300)
    await pool.execute("VACUUM (ANALYZE)", timeout=300)
