"""What the checkpointer shows: ages of the shards it knows of, as long as it leads."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

import pytest
from opentelemetry.metrics import CallbackOptions

from noetl_checkpointer import main, metrics
from noetl_checkpointer.config import CheckpointerConfig
from noetl_core.domain.ids import ShardId
from noetl_core.process.leader import leadership
from noetl_core.process.service import Service, serving
from noetl_core.store.postgres import Pool


def ages() -> dict[int, float]:
    return {one.attributes["shard"]: one.value for one in metrics._observed(CallbackOptions())}  # type: ignore[index, misc]


def test_a_quiet_shard_has_no_age_and_one_that_is_gone_is_not_shown() -> None:
    metrics.show_ages([ShardId(0), ShardId(1)], {ShardId(1): 900.0})
    assert ages() == {0: 0.0, 1: 900.0}

    metrics.show_ages([ShardId(0)], {})

    assert ages() == {0: 0.0}


def test_ages_grow_while_nobody_can_look(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics.show_ages([ShardId(0), ShardId(1)], {ShardId(1): 900.0})
    now = time.monotonic()

    with monkeypatch.context() as later:
        later.setattr("time.monotonic", lambda: now + 20)
        found = ages()

    assert found[0] >= 20_000
    assert found[1] >= 20_900


async def test_ages_are_shown_when_the_lease_of_the_leader_lapses_until_another_leads(
    pool: Pool, database: str, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an outage of Postgres: here the row of the lease alone cannot be reached."""
    monkeypatch.setattr(main, "leadership", partial(leadership, lease_seconds=0.9))
    monkeypatch.setattr(main, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(metrics, "SILENT_SECONDS", 0.5)
    config = CheckpointerConfig(postgres_dsn=database, nats_url=nats_url)

    async with serving(Service("checkpointer", config), main.start), asyncio.timeout(60):
        await until(lambda: set(ages().values()) == {0.0})
        async with pool.acquire() as conn, conn.transaction():
            await conn.execute("LOCK TABLE noetl.leader IN ACCESS EXCLUSIVE MODE")
            await until(lambda: len(ages()) == 16 and min(ages().values()) > 1000)
            await conn.execute(
                "UPDATE noetl.leader SET owner_runtime_id = 7, epoch = epoch + 1,"
                " leased_until = now() + interval '1 hour'"
            )
        await until(lambda: not ages())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the service changes it
        await asyncio.sleep(0.02)


def test_who_leads_no_more_shows_nothing() -> None:
    metrics.show_ages([ShardId(0)], {ShardId(0): 900.0})

    metrics.show_ages((), {})

    assert ages() == {}
