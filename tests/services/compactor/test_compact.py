"""The turn of the compactor: which partitions exist afterwards."""

import pytest
from opentelemetry.metrics import CallbackOptions
from structlog.testing import capture_logs

from noetl_compactor import metrics
from noetl_compactor.compact import Told, compact
from noetl_compactor.config import CompactorConfig
from noetl_compactor.main import start
from noetl_core.domain.partitions import WEEK_MS, partitions_ahead
from noetl_core.domain.snowflake import first_id_at
from noetl_core.process.clock import unix_ms
from noetl_core.process.service import Service, serving
from noetl_core.store.postgres import Pool

NOW_MS = unix_ms()


async def partitions(pool: Pool) -> set[str]:
    rows = await pool.fetch(
        "SELECT relname FROM pg_partition_tree('noetl.event') JOIN pg_class ON oid = relid"
        " WHERE isleaf UNION ALL"
        " SELECT relname FROM pg_partition_tree('noetl.result_ref') JOIN pg_class ON oid = relid"
        " WHERE isleaf"
    )
    return {row["relname"] for row in rows}


async def test_this_week_and_the_coming_ones_have_partitions(
    pool: Pool, compactor_pool: Pool
) -> None:
    outcomes = await compact(compactor_pool, Told(), now_ms=NOW_MS, weeks_ahead=3)

    assert outcomes == {"created": 8}
    wanted = {one.name for one in partitions_ahead(now_ms=NOW_MS, weeks=3)}
    assert await partitions(pool) == wanted | {"event_default", "result_ref_default"}


async def test_a_week_later_one_more_of_each_is_made(pool: Pool, compactor_pool: Pool) -> None:
    await compact(compactor_pool, Told(), now_ms=NOW_MS, weeks_ahead=3)

    outcomes = await compact(compactor_pool, Told(), now_ms=NOW_MS + WEEK_MS, weeks_ahead=3)

    assert outcomes == {"exists": 6, "created": 2}


async def test_a_week_that_began_in_the_default_partition_does_not_stop_the_next(
    pool: Pool, compactor_pool: Pool
) -> None:
    await pool.execute(
        "INSERT INTO noetl.event (execution_id, event_id, event_key, shard_id, event_type)"
        " VALUES ($1, 1, 'k', 0, 'execution.started')",
        first_id_at(NOW_MS),
    )

    outcomes = await compact(compactor_pool, Told(), now_ms=NOW_MS, weeks_ahead=2)

    assert outcomes == {"occupied": 1, "created": 5}
    assert await pool.fetchval("SELECT count(*) FROM noetl.event") == 1


async def test_more_partitions_than_retention_would_leave_are_shown_and_said_once(
    pool: Pool, compactor_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("noetl_compactor.compact.PARTITIONS_MAX", 4)
    told = Told()

    with capture_logs() as lines:
        counts = []
        for weeks_ahead in (2, 3, 3):  # this week and the default one besides
            await compact(compactor_pool, told, now_ms=NOW_MS, weeks_ahead=weeks_ahead)
            counts += [one.value for one in metrics._count(CallbackOptions())]

    assert counts == [4, 5, 5]
    assert [line["count"] for line in lines if line["event"] == "partition.many"] == [5]


async def test_the_service_makes_them_at_its_start(pool: Pool, database: str) -> None:
    config = CompactorConfig(postgres_dsn=database, partition_weeks_ahead=1)
    async with serving(Service("compactor", config), start) as service:
        pass  # it is stopped after its first turn at the earliest

    assert service.stopping.is_set()
    assert len(await partitions(pool)) == 6
