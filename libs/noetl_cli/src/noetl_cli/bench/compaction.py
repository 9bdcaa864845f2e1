"""How fast the compactor takes a week out of the database: copied, compared, recorded, dropped."""

import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from pathlib import Path

import asyncpg
import msgspec
import structlog

from noetl_cli.archives import store_config
from noetl_cli.bench.usage import Usage
from noetl_cli.failure import CommandFailed
from noetl_cli.schema import temporary_database
from noetl_cli.stack.migrations import apply_migrations
from noetl_compactor.archive import Rules, archive_past
from noetl_core.blob.away import StoreAwayError
from noetl_core.blob.place import Place
from noetl_core.domain.partitions import WEEK_MS, partition_of, week_start_ms
from noetl_core.domain.retention import DAY_MS
from noetl_core.domain.snowflake import Snowflake, first_id_at
from noetl_core.process.clock import unix_ms
from noetl_core.process.stores import open_archives
from noetl_core.store import partition
from noetl_core.store.archive import COPY_SETTINGS
from noetl_core.store.postgres import open_pool

EVENTS_DEFAULT = 500_000
EVENTS_PER_EXECUTION = 100
SHARDS = 16

# Executions of a hundred events like those of a loop: every third ends a call with a result.
_EVENTS = """
INSERT INTO noetl.event (
    execution_id, event_id, event_key, shard_id, event_type, status, node_name, command_id, loop_id,
    iter_index, attempt, context, result, meta, created_at
)
SELECT x.id, x.id + n, 'call.done:each.1/' || n || '#1', x.number % $3,
       CASE n % 3 WHEN 0 THEN 'call.done' WHEN 1 THEN 'command.issued' ELSE 'command.claimed' END,
       'COMPLETED', 'each', 'each.1/' || n || '#1', x.id + 2, n, 1,
       '{"pool": "cpu", "priority": 0}',
       CASE WHEN n % 3 = 0 THEN jsonb_build_object(
           'status', 'ok', 'context', '{}'::jsonb,
           'parent_ref', jsonb_build_object('ref_id', x.id + 1),
           'reference', jsonb_build_object('ref_id', x.id + n, 'type', 'db', 'bytes', 256)
       ) END,
       '{"worker_id": "worker-1-0123456789", "duration_ms": 1.25}',
       clock_timestamp()
FROM (
    SELECT number, $1::bigint + number::bigint * 4096 AS id FROM generate_series(1, $2) AS number
) AS x,
     generate_series(1, $4) AS n
"""
_RESULTS = """
INSERT INTO noetl.result_ref (
    execution_id, ref_id, step, store_tier, bytes, sha256, inline
)
SELECT execution_id, event_id, 'each', 'db', 256, sha256(event_key::bytea),
       sha512(event_id::text::bytea) || sha512(execution_id::text::bytea) ||
       sha512(event_key::bytea) || sha512((event_id + 1)::text::bytea)
FROM noetl.event WHERE event_type = 'call.done'
"""
_EXECUTIONS = """
INSERT INTO noetl.execution (
    execution_id, catalog_id, path, version, shard_id, status, state, ctx, progress,
    last_event_type, last_projected_event_id, started_at, updated_at, ended_at
)
SELECT execution_id, 1, 'bench', 1, 0, 'COMPLETED', '{}', '{}', '{}', 'execution.completed',
       max(event_id), $1, $1, $1
FROM noetl.event GROUP BY execution_id
"""


class CompactionFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One compactor, one connection: `events_per_second` from the first row to the drop.

    `..._per_shard` is what of it goes to each shard: they share the one compactor.
    """

    bench: str
    n: int
    place: str
    events: int
    results: int
    shards: int
    seconds: float
    events_per_second: float
    events_per_second_per_shard: float
    megabytes: float
    services: dict[str, Usage] = {}


async def measure_compaction(
    *, n: int | None, archive_dir: str = "", shards: int = SHARDS
) -> CompactionFigures:
    """`archive_dir` is where the archive goes, and is taken away from: here, or in S3."""
    # The answer goes to stdout: what the compactor logs on the way does not.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    async with _place(archive_dir) as place, temporary_database() as dsn:
        await apply_migrations(dsn)
        count = n or EVENTS_DEFAULT
        await _fill(dsn, max(count // EVENTS_PER_EXECUTION, 1), shards)
        return await _measure(dsn, count, place, shards)


@asynccontextmanager
async def _place(archive_dir: str) -> AsyncIterator[Place]:
    """One of this run alone, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="noetl-archive-") as directory:
        own = f"{archive_dir}/{Path(directory).name}" if archive_dir else directory
        async with open_archives(store_config(own)) as place:
            assert place is not None, own
            try:
                yield place
            finally:
                with suppress(StoreAwayError):  # whoever measured was told that it is away
                    for name in await place.names():
                        await place.delete(name)
                _remove_directory(own)


def _remove_directory(location: str) -> None:
    """Where the place is one: it stays when its files are gone."""
    with suppress(OSError):
        Path(location).rmdir()


async def _fill(dsn: str, executions: int, shards: int) -> None:
    week_ms = _old_week_ms()
    connection = await asyncpg.connect(dsn)
    try:
        for table in ("event", "result_ref"):
            await partition.ensure(connection, partition_of(table, start_ms=week_ms))
        await connection.execute(
            _EVENTS, first_id_at(week_ms), executions, shards, EVENTS_PER_EXECUTION
        )
        await connection.execute(_RESULTS)
        await connection.execute(_EXECUTIONS, datetime.fromtimestamp(week_ms / 1000).astimezone())
        await connection.execute("VACUUM (ANALYZE)")
    finally:
        await connection.close()


async def _measure(dsn: str, n: int, place: Place, shards: int) -> CompactionFigures:
    mint = Snowflake(node=1, now_ms=unix_ms).mint
    rules = Rules(place, mint, unix_ms() - 30 * DAY_MS)
    async with open_pool(dsn, role="noetl_compactor", size_max=2, settings=COPY_SETTINGS) as pool:
        results = int(await pool.fetchval("SELECT count(*) FROM noetl.result_ref"))
        begun = time.perf_counter()
        events = await archive_past(pool, rules)
        seconds = time.perf_counter() - begun
        left = int(await pool.fetchval("SELECT count(*) FROM noetl.event"))
        if left:
            raise CommandFailed(f"the archive in {place.location} did not come about; see above.")
        size = int(await pool.fetchval("SELECT sum(bytes) FROM noetl.manifest_part"))
    return CompactionFigures(
        bench="compact",
        n=n,
        place=place.tier,
        events=events,
        results=results,
        shards=shards,
        seconds=round(seconds, 3),
        events_per_second=round(events / seconds, 1),
        events_per_second_per_shard=round(events / seconds / shards, 1),
        megabytes=round(size / 1e6, 1),
    )


def _old_week_ms() -> int:
    return week_start_ms(unix_ms()) - 10 * WEEK_MS
