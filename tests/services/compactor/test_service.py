"""The service with retention switched on."""

import asyncio
from pathlib import Path

import pytest

from noetl_compactor.config import CompactorConfig
from noetl_compactor.main import start
from noetl_core.process.config import ConfigError, load_config
from noetl_core.process.service import Service, serving
from noetl_core.store.postgres import Pool

from .old_log import WEEK, a_week, an_execution, rows_of, tables

ARCHIVED_SECONDS_MAX = 30.0


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
