"""process/membership.py: a process keeps its id and its node number, or stops minting."""

import asyncio

import pytest

from noetl_core.domain.errors import RetryableError
from noetl_core.process.config import Config
from noetl_core.process.membership import (
    NODE_LEASE_MARGIN_SECONDS,
    Member,
    NameTakenError,
    join_runtime,
)
from noetl_core.process.service import Service, serving
from noetl_core.store.postgres import Pool, open_pool
from noetl_core.store.runtime import NODE_LEASE_SECONDS, Registration
from support.clock import FakeClock

LEASE_SECONDS = NODE_LEASE_SECONDS - NODE_LEASE_MARGIN_SECONDS


async def enrolled(pool: Pool, name: str = "broker-1", clock: FakeClock | None = None) -> Member:
    member = Member(pool, Registration(name=name, kind="broker"), clock or FakeClock())
    await member.heartbeat()
    return member


async def test_members_that_join_at_once_mint_distinct_ids(pool: Pool) -> None:
    members = await asyncio.gather(*(enrolled(pool, f"broker-{i}") for i in range(10)))

    ids = [member.mint() for member in members for _ in range(100)]

    assert len(set(ids)) == len(ids)
    assert len({member.runtime_id for member in members}) == len(members)


async def test_a_process_that_slept_through_its_lease_mints_nothing(pool: Pool) -> None:
    clock = FakeClock()
    member = await enrolled(pool, clock=clock)
    clock.advance(LEASE_SECONDS)

    with pytest.raises(RetryableError):
        member.mint()


async def test_a_heartbeat_lets_it_mint_again(pool: Pool) -> None:
    clock = FakeClock()
    member = await enrolled(pool, clock=clock)
    before = member.mint()
    clock.advance(LEASE_SECONDS)

    await member.heartbeat()

    assert member.mint() > before


async def test_a_row_that_vanished_is_made_again_under_the_same_id(pool: Pool) -> None:
    member = await enrolled(pool)
    runtime_id, before = member.runtime_id, member.mint()
    await pool.execute("DELETE FROM noetl.runtime")
    await enrolled(pool, "the next one takes node 0")

    await member.heartbeat()

    assert member.runtime_id == runtime_id
    assert member.node == 1
    assert member.mint() > before


async def test_two_living_processes_of_one_name_are_an_error_of_the_first(pool: Pool) -> None:
    first = await enrolled(pool, "broker-0")
    second = await enrolled(pool, "broker-0")

    with pytest.raises(NameTakenError):
        await first.heartbeat()
    await second.heartbeat()


async def test_ids_are_minted_above_the_floor_that_was_passed_over(pool: Pool) -> None:
    member = await enrolled(pool)
    floor = member.mint() + (10_000 << 22)

    member.pass_over(floor)

    assert member.mint() > floor


async def test_a_service_is_registered_while_it_lives_and_offline_after(
    pool: Pool, database: str
) -> None:
    statuses = []

    async def start(service: Service[Config]) -> None:
        own = await service.open(open_pool(database, role="noetl_worker", size_max=2))
        await service.open(join_runtime(service, own, kind="worker", capacity=8))
        statuses.append(await pool.fetchrow("SELECT status, capacity, name FROM noetl.runtime"))

    async with serving(Service("worker", Config(postgres_dsn=database, instance="w-1")), start):
        pass
    statuses.append(await pool.fetchrow("SELECT status, capacity, name FROM noetl.runtime"))

    assert [tuple(row) for row in statuses if row] == [
        ("ready", 8, "w-1"),
        ("offline", 8, "w-1"),
    ]
