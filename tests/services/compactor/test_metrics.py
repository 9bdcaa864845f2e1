"""What the compactor shows: the numbers of whoever leads, and of nobody else."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from opentelemetry.metrics import CallbackOptions, Observation

from noetl_compactor import metrics
from noetl_compactor.archive import archive_past
from noetl_compactor.config import CompactorConfig
from noetl_compactor.main import start
from noetl_core.blob.file_place import FilePlace
from noetl_core.process.service import Service, serving
from noetl_core.store.postgres import Pool

from .old_log import a_week, an_execution, rules

CLEARED_SECONDS_MAX = 60.0


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    metrics.show_nothing()
    yield
    metrics.show_nothing()


def values(gauge: Callable[[CallbackOptions], Iterable[Observation]]) -> dict[object, float]:
    seen = gauge(CallbackOptions())
    return {next(iter((one.attributes or {}).values())): one.value for one in seen}


async def test_the_rate_is_that_of_the_last_archive_alone(
    pool: Pool, compactor_pool: Pool, tmp_path: Path
) -> None:
    metrics.show_rate({2: 17.0, 5: 3.0})
    await a_week(pool)
    await an_execution(pool, 1)  # in shard 1

    await archive_past(compactor_pool, rules(FilePlace(tmp_path)))

    assert values(metrics._rate).keys() == {1}


def test_partitions_that_were_made_after_all_are_not_missing_any_more() -> None:
    metrics.show_missing({"occupied": 2, "busy": 1})
    metrics.show_missing({"occupied": 0, "busy": 1})

    assert values(metrics._missing) == {"occupied": 0, "busy": 1}


async def test_who_does_not_lead_shows_nothing(pool: Pool, database: str) -> None:
    await pool.execute(
        "INSERT INTO noetl.leader (role, owner_runtime_id, epoch, leased_until)"
        " VALUES ('compactor', 1, 1, now() + interval '1 hour')"
    )
    metrics.show_missing({"occupied": 2, "busy": 0})
    metrics.show_rate({1: 1000.0})
    config = CompactorConfig(postgres_dsn=database, compactor_interval_seconds=0.05)

    async with serving(Service("compactor", config), start), asyncio.timeout(CLEARED_SECONDS_MAX):
        while values(metrics._missing):  # noqa: ASYNC110 - the service clears it
            await asyncio.sleep(0.02)

    assert values(metrics._rate) == {}
