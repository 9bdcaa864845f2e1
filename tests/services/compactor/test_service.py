"""The service with retention switched on."""

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest

from noetl_compactor import main
from noetl_compactor.config import CompactorConfig
from noetl_compactor.main import start
from noetl_core.domain.partitions import partitions_ahead
from noetl_core.process.clock import unix_ms
from noetl_core.process.config import ConfigError, load_config
from noetl_core.process.service import Service, serving
from noetl_core.store.postgres import Pool

from .old_log import WEEK, a_week, an_execution, rows_of, tables

ARCHIVED_SECONDS_MAX = 60.0


async def test_it_archives_what_is_past_retention(
    pool: Pool, database: str, tmp_path: Path
) -> None:
    await a_week(pool)
    await an_execution(pool, 1)
    config = CompactorConfig(
        postgres_dsn=database,
        compactor_enabled=True,
        store_dir=str(tmp_path),
        compactor_interval_seconds=0.1,
    )

    async with serving(Service("compactor", config), start):
        async with asyncio.timeout(ARCHIVED_SECONDS_MAX):
            while f"event_{WEEK}" in await tables(pool):  # noqa: ASYNC110 - another process acts
                await asyncio.sleep(0.05)

    assert await rows_of(pool, "event") == []
    assert [one.name.split("-")[0] for one in (tmp_path / "archive").iterdir()] == [WEEK]


@pytest.mark.parametrize(("own_days", "kept_days"), [(60, 80), (-60, 20)], ids=["ahead", "behind"])
async def test_one_whose_own_clock_is_wrong_archives_nothing_too_early_and_makes_this_week(
    pool: Pool,
    database: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own_days: int,
    kept_days: int,
) -> None:
    """The week is 70 days old: ahead, our clock alone says that it is past; behind, that of the
    database alone."""
    await a_week(pool)
    await an_execution(pool, 1)
    await pool.execute(
        "INSERT INTO noetl.idempotency (idempotency_key, fingerprint, execution_id, created_at)"
        " VALUES ('old', '', 1, now() - $1::interval)",
        timedelta(days=300),
    )
    own_ms = unix_ms() + own_days * 24 * 60 * 60 * 1000
    monkeypatch.setattr(main, "unix_ms", lambda: own_ms)
    config = CompactorConfig(
        postgres_dsn=database,
        compactor_enabled=True,
        retention_days=kept_days,
        store_dir=str(tmp_path),
        compactor_interval_seconds=0.1,
    )

    wanted = {one.name for one in partitions_ahead(now_ms=unix_ms(), weeks=1)}

    # A turn of archiving ends with the old keys.
    keys = "SELECT count(*) FROM noetl.idempotency"
    async with serving(Service("compactor", config), start), asyncio.timeout(ARCHIVED_SECONDS_MAX):
        while await pool.fetchval(keys) or wanted - await tables(pool):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.05)

    assert len(await rows_of(pool, "event")) == 4


async def test_keys_of_today_stay_however_short_the_retention_is(
    pool: Pool, database: str, tmp_path: Path
) -> None:
    for key, days in (("of today", 0.5), ("old", 2)):
        await pool.execute(
            "INSERT INTO noetl.idempotency (idempotency_key, fingerprint, execution_id, created_at)"
            " VALUES ($1, '', 1, now() - $2::interval)",
            key,
            timedelta(days=days),
        )
    config = CompactorConfig(
        postgres_dsn=database,
        compactor_enabled=True,
        retention_days=0,
        store_dir=str(tmp_path),
        compactor_interval_seconds=0.1,
    )

    left = "SELECT array_agg(idempotency_key) FROM noetl.idempotency"
    async with serving(Service("compactor", config), start), asyncio.timeout(ARCHIVED_SECONDS_MAX):
        while "old" in await pool.fetchval(left):  # noqa: ASYNC110 - another process acts
            await asyncio.sleep(0.05)

    assert await pool.fetchval(left) == ["of today"]


async def test_it_keeps_everything_unless_it_is_told_to(
    pool: Pool, database: str, tmp_path: Path
) -> None:
    await a_week(pool)
    await an_execution(pool, 1)
    config = CompactorConfig(postgres_dsn=database, store_dir=str(tmp_path))

    async with serving(Service("compactor", config), start):
        await asyncio.sleep(0.5)

    assert len(await rows_of(pool, "event")) == 4


def test_without_a_place_for_archives_it_does_not_start() -> None:
    environ = {"NOETL_POSTGRES_DSN": "postgresql://x", "NOETL_COMPACTOR_ENABLED": "true"}

    with pytest.raises(ConfigError, match="NOETL_ARCHIVE_DIR or NOETL_STORE_DIR"):
        load_config(CompactorConfig, environ)
