"""The turn of the shard-manager: its books, and what it tells."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from noetl_core.bus.connection import Bus, open_bus
from noetl_core.domain.ids import RuntimeId
from noetl_core.process.service import Service, serving
from noetl_core.store import execution_shard
from noetl_core.store.postgres import Pool, open_pool
from noetl_core.store.setting import write_setting
from noetl_core.wire.subjects import TOPOLOGY
from noetl_core.wire.topology import Topology, decode_topology
from noetl_shard_manager.assign import Known, assign
from noetl_shard_manager.config import ShardManagerConfig
from noetl_shard_manager.main import start


@pytest.fixture
async def manager_pool(database: str) -> AsyncIterator[Pool]:
    async with open_pool(database, role="noetl_shard_manager", size_max=2) as opened:
        yield opened


@pytest.fixture
async def told(bus: Bus) -> "asyncio.Queue[Topology]":
    """Everything that is published as the topology from now on."""
    heard: asyncio.Queue[Topology] = asyncio.Queue()

    async def hear(body: bytes) -> None:
        heard.put_nowait(decode_topology(body))

    await bus.subscribe(TOPOLOGY, hear)
    return heard


async def turn(pool: Pool, bus: Bus, known: Known | None = None) -> Topology:
    return await assign(pool, bus, known or Known())


async def add_process(pool: Pool, runtime_id: int, *, silent_seconds: float, status: str) -> None:
    await pool.execute(
        "INSERT INTO noetl.runtime (runtime_id, name, kind, status, node, heartbeat)"
        " VALUES ($1::bigint, 'p' || $1::bigint, 'broker', $2, $1::bigint,"
        "         now() - make_interval(secs => $3))",
        runtime_id,
        status,
        silent_seconds,
    )


async def claim(pool: Pool, owner: int, limit: int) -> None:
    await execution_shard.claim(
        pool, "broker", RuntimeId(owner), instance=f"p{owner}", lease_seconds=30, limit=limit
    )


async def test_every_shard_of_the_shard_count_gets_a_row_for_both_roles(
    pool: Pool, manager_pool: Pool, bus: Bus
) -> None:
    await pool.execute("DELETE FROM noetl.execution_shard WHERE shard_id IN (3, 9)")
    await claim(pool, 1, limit=2)
    await write_setting(pool, "shard_count", 20)

    found = await turn(manager_pool, bus)

    assert found.shard_count == 20
    for role in ("broker", "projection"):
        mine = [one for one in found.shards if one.role == role]
        assert [one.shard_id for one in mine] == list(range(20))
    assert [one.instance for one in found.shards][:3] == ["p1", "p1", None], "owners were touched"


async def test_a_change_is_told_once(
    pool: Pool, manager_pool: Pool, bus: Bus, told: "asyncio.Queue[Topology]"
) -> None:
    known = Known()
    for _ in range(3):
        await turn(manager_pool, bus, known)
    await claim(pool, 7, limit=4)
    for _ in range(3):
        last = await turn(manager_pool, bus, known)

    async with asyncio.timeout(60):
        first, second = await told.get(), await told.get()
    assert [one.instance for one in first.shards if one.instance] == []
    assert [one.instance for one in second.shards if one.instance] == ["p7"] * 4
    assert second == last
    assert told.empty()


async def test_a_renewed_lease_is_no_change(
    pool: Pool, manager_pool: Pool, bus: Bus, told: "asyncio.Queue[Topology]"
) -> None:
    known = Known()
    await claim(pool, 7, limit=16)
    await turn(manager_pool, bus, known)
    await execution_shard.renew(pool, "broker", RuntimeId(7), lease_seconds=60)

    await turn(manager_pool, bus, known)

    async with asyncio.timeout(60):
        await told.get()
    assert told.empty()


async def test_a_lease_that_ran_out_has_no_owner(pool: Pool, manager_pool: Pool, bus: Bus) -> None:
    await claim(pool, 7, limit=16)
    await pool.execute("UPDATE noetl.execution_shard SET leased_until = now() - interval '1 s'")

    found = await turn(manager_pool, bus)

    assert not [one for one in found.shards if one.instance is not None]


async def test_what_changed_while_nats_was_away_is_told_later(
    pool: Pool, manager_pool: Pool, bus: Bus, told: "asyncio.Queue[Topology]"
) -> None:
    known = Known()
    async with open_bus("nats://127.0.0.1:1", name="away") as away:
        await turn(manager_pool, away, known)
        assert known.published is None

    await turn(manager_pool, bus, known)

    async with asyncio.timeout(60):
        assert await told.get() == known.published


async def test_only_the_leader_of_two_tells(
    database: str, nats_url: str, told: "asyncio.Queue[Topology]"
) -> None:
    def manager(instance: str) -> Service[ShardManagerConfig]:
        config = ShardManagerConfig(
            postgres_dsn=database,
            nats_url=nats_url,
            instance=instance,
            shard_manager_interval_seconds=0.05,
        )
        return Service("shard-manager", config)

    async with asyncio.timeout(60), serving(manager("a"), start):
        await told.get()
        async with serving(manager("b"), start):
            # The second joins; only the first says so, and says it once.
            after = await told.get()
            await asyncio.sleep(0.3)
            assert told.empty()

    assert {one.name for one in after.members} == {"a", "b"}
