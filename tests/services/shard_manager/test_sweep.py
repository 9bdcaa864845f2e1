"""The sweeper: who is offline, who is forgotten, and what is written down of the workers."""

import asyncio
from collections.abc import AsyncIterator
from itertools import count

import pytest

from noetl_core.process.membership import Member
from noetl_core.process.service import Service, serving
from noetl_core.store import metric, runtime
from noetl_core.store.metric import Sample
from noetl_core.store.postgres import Pool, open_pool
from noetl_core.store.runtime import Registration
from noetl_shard_manager.config import ShardManagerConfig
from noetl_shard_manager.main import start
from noetl_shard_manager.sweep import Hearing, measure, sweep


@pytest.fixture
async def manager_pool(database: str) -> AsyncIterator[Pool]:
    async with open_pool(database, role="noetl_shard_manager", size_max=2) as opened:
        yield opened


async def add_process(pool: Pool, number: int, *, silent_seconds: float, status: str) -> None:
    await pool.execute(
        "INSERT INTO noetl.runtime (runtime_id, name, kind, status, heartbeat, runtime)"
        " VALUES ($1::bigint, 'p' || $1::bigint, 'worker', $2,"
        ' now() - make_interval(secs => $3), \'{"running": 3, "free": 5, "pid": 7}\')',
        number,
        status,
        silent_seconds,
    )


async def statuses(pool: Pool) -> dict[str, str]:
    rows = await pool.fetch("SELECT name, status FROM noetl.runtime WHERE kind = 'worker'")
    return {row["name"]: row["status"] for row in rows}


async def test_a_silent_process_is_offline_and_is_forgotten_after_a_day(
    pool: Pool, manager_pool: Pool
) -> None:
    await add_process(pool, 1, silent_seconds=5, status="ready")
    await add_process(pool, 2, silent_seconds=60, status="ready")
    await add_process(pool, 3, silent_seconds=60, status="draining")
    await add_process(pool, 4, silent_seconds=90_000, status="offline")
    await add_process(pool, 5, silent_seconds=80_000, status="offline")

    await sweep(manager_pool, offline_seconds=45, forget_seconds=86_400)

    offline = dict.fromkeys(("p2", "p3", "p5"), "offline")
    assert await statuses(pool) == {"p1": "ready"} | offline


async def test_after_an_outage_everybody_has_the_whole_time_to_be_heard(
    pool: Pool, manager_pool: Pool
) -> None:
    await add_process(pool, 1, silent_seconds=100, status="ready")
    now = 0.0
    hearing = Hearing(late_seconds=30, clock=lambda: now)
    seen = []

    for now in (15, 30, 90, 105, 120, 135, 150):
        heard_seconds = await hearing.look(manager_pool)
        await sweep(
            manager_pool, offline_seconds=45, forget_seconds=86_400, heard_seconds=heard_seconds
        )
        seen.append((await statuses(pool))["p1"])
        if now < 90:
            await pool.execute("UPDATE noetl.runtime SET status = 'ready' WHERE name = 'p1'")

    # The turns between 30 and 90 s failed, or hung.
    assert seen == ["offline"] * 2 + ["ready"] * 4 + ["offline"]


async def test_a_process_of_ours_that_died_is_offline_until_it_is_forgotten(
    pool: Pool, manager_pool: Pool
) -> None:
    ids = count(100)
    for name in ("dead", "next"):
        async with pool.acquire() as conn, conn.transaction():
            registration = Registration(name=name, kind="worker")
            await runtime.register(conn, registration, lambda _: next(ids))
        if name == "dead":
            await pool.execute("UPDATE noetl.runtime SET heartbeat = now() - interval '61 s'")

    await sweep(manager_pool, offline_seconds=45, forget_seconds=86_400)
    assert await statuses(pool) == {"dead": "offline", "next": "ready"}

    await sweep(manager_pool, offline_seconds=45, forget_seconds=60.5)
    assert await statuses(pool) == {"next": "ready"}


async def test_the_time_of_the_last_sweep_is_written_down(pool: Pool, manager_pool: Pool) -> None:
    await measure(manager_pool, name="m", keep_seconds=60)
    assert not await pool.fetch("SELECT FROM noetl.metric WHERE name = 'noetl_sweep_ms'")

    await measure(manager_pool, name="m", keep_seconds=60, sweep_ms=12.5)

    assert await pool.fetchval("SELECT value FROM noetl.metric WHERE name = 'noetl_sweep_ms'") == (
        12.5
    )


async def test_how_heartbeats_went_and_what_a_process_uses_is_written_down(
    pool: Pool, manager_pool: Pool
) -> None:
    member = Member(pool, Registration(name="g", kind="api-gateway"))
    for _ in range(3):
        await member.heartbeat()

    await measure(manager_pool, name="m", keep_seconds=60)

    rows = await pool.fetch(
        "SELECT name, value FROM noetl.metric WHERE labels->>'component' = 'g'"
        " AND labels->>'kind' = 'api-gateway'"
    )
    found = {row["name"]: row["value"] for row in rows}
    assert found["noetl_heartbeat_success_rate"] == 1
    assert found["noetl_heartbeat_latency_ms"] > 0
    assert found["noetl_process_memory_peak_bytes"] > 1_000_000
    assert found["noetl_process_cpu_percent"] >= 0


async def test_what_the_workers_said_last_is_written_down(pool: Pool, manager_pool: Pool) -> None:
    await add_process(pool, 1, silent_seconds=5, status="ready")
    await add_process(pool, 2, silent_seconds=60, status="offline")
    for number in range(3):
        await pool.execute(
            "INSERT INTO noetl.command (execution_id, command_id, shard_id, step, payload)"
            " VALUES ($1, 'a.1#1', 0, 'a', '')",
            number,
        )

    await measure(manager_pool, name="m", keep_seconds=60)

    rows = await pool.fetch("SELECT name, value, labels->>'component' FROM noetl.metric")
    found = {(row[0], row[2]): row[1] for row in rows if row[0] != "noetl_sweep_ms"}
    assert found == {
        ("noetl_workers_active", "system"): 1,
        ("noetl_queue_pending", "system"): 3,
        ("noetl_queue_leased", "system"): 0,
        ("noetl_queue_held", "system"): 0,
        ("noetl_worker_running", "p1"): 3,
        ("noetl_worker_free", "p1"): 5,
    }


async def test_old_metrics_are_forgotten(pool: Pool, manager_pool: Pool) -> None:
    await metric.report(pool, [Sample("old", 1.0), Sample("new", 1.0)], kind="k", component="c")
    await pool.execute(
        "UPDATE noetl.metric SET reported_at = now() - interval '1 hour' WHERE name = 'old'"
    )

    assert not await measure(manager_pool, name="m", keep_seconds=60)

    names = {row[0] for row in await pool.fetch("SELECT name FROM noetl.metric")}
    assert "new" in names
    assert "old" not in names


async def test_the_service_sweeps_and_measures(pool: Pool, database: str, nats_url: str) -> None:
    await add_process(pool, 1, silent_seconds=60, status="ready")
    config = ShardManagerConfig(
        postgres_dsn=database,
        nats_url=nats_url,
        server_sweep_interval=0.05,
        server_metrics_interval=0.05,
    )

    async with serving(Service("shard-manager", config), start), asyncio.timeout(60):
        while (await statuses(pool))["p1"] != "offline":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        while not await pool.fetchval("SELECT count(*) FROM noetl.metric"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
