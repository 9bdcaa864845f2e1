"""The shard-manager says who shall have which shard, and the owners do it."""

from noetl_core.bus.connection import Bus
from noetl_core.process.membership import Member
from noetl_core.process.ownership import ShardOwner
from noetl_core.store import execution_shard, resize
from noetl_core.store.postgres import Pool
from noetl_core.store.runtime import Registration
from noetl_core.store.setting import write_setting
from noetl_shard_manager.balance import balance
from noetl_shard_manager.switch import clear_up, switch


async def owner(pool: Pool, name: str) -> ShardOwner:
    member = Member(pool, Registration(name=name, kind="broker"))
    await member.heartbeat()
    return ShardOwner(pool, member, role="broker")


async def settle(pool: Pool, bus: Bus, owners: list[ShardOwner]) -> None:
    for _ in range(3):
        await balance(pool, bus)
        for one in (*owners, *owners):
            await one.keep()


async def test_a_fourth_broker_gets_its_fair_share_and_nothing_else_moves(
    pool: Pool, manager_pool: Pool, bus: Bus
) -> None:
    owners = [await owner(pool, name) for name in "abc"]
    await settle(manager_pool, bus, owners)
    before = [dict(one.held()) for one in owners]
    assert sorted(map(len, before)) == [5, 5, 6]

    owners.append(await owner(pool, "d"))
    await settle(manager_pool, bus, owners)

    assert [len(one.held()) for one in owners] == [4, 4, 4, 4]
    for one, had in zip(owners, before, strict=False):
        assert one.held().items() <= had.items(), "a shard moved that need not"


async def test_what_the_survivors_took_is_shared_fairly_in_the_end(
    pool: Pool, manager_pool: Pool, bus: Bus
) -> None:
    owners = [await owner(pool, name) for name in "abcd"]
    await settle(manager_pool, bus, owners)
    await owners.pop().release()

    await settle(manager_pool, bus, owners)

    assert sorted(len(one.held()) for one in owners) == [5, 5, 6]


async def test_a_fair_share_stays_as_it_is(pool: Pool, manager_pool: Pool, bus: Bus) -> None:
    owners = [await owner(pool, name) for name in "abc"]
    await settle(manager_pool, bus, owners)
    before = [dict(one.held()) for one in owners]

    await settle(manager_pool, bus, owners)

    assert [dict(one.held()) for one in owners] == before


async def test_of_fewer_shards_each_owner_has_its_share_of_those_that_work(
    pool: Pool, manager_pool: Pool, bus: Bus
) -> None:
    await resize.request(pool, 1, shards_from=16, shards_to=4)
    await switch(manager_pool, bus, mint_above=mint_above)
    first = await owner(pool, "a")
    await first.keep()

    owners = [first, await owner(pool, "b")]
    await settle(manager_pool, bus, owners)

    assert [len(one.held()) for one in owners] == [8, 8]
    assert [len([shard for shard in one.held() if shard < 4]) for one in owners] == [2, 2]


def mint_above(floor: int) -> int:
    return floor + 1


async def test_a_wish_is_granted_once_and_takes_every_shard_from_its_owner(
    pool: Pool, manager_pool: Pool, bus: Bus
) -> None:
    one = await owner(pool, "a")
    await one.keep()
    before = dict(one.held())
    await resize.request(pool, 1, shards_from=16, shards_to=64)

    first = await switch(manager_pool, bus, mint_above=mint_above)
    second = await switch(manager_pool, bus, mint_above=mint_above)

    rows = {row.shard_id: row for row in await execution_shard.look(pool, "broker")}
    assert (first, second) == (True, False)
    assert len(rows) == len(await execution_shard.look(pool, "projection")) == 64
    assert all(rows[shard].epoch > epoch for shard, epoch in before.items())
    assert not any(row.is_leased for row in rows.values())


async def test_the_switch_is_above_every_event(pool: Pool, manager_pool: Pool, bus: Bus) -> None:
    await pool.execute(
        "INSERT INTO noetl.event (execution_id, event_id, event_key, shard_id, event_type)"
        " VALUES (1, 500, 'a', 3, 'step.enter'), (2, 900, 'b', 15, 'step.enter')"
    )
    await resize.request(pool, 1, shards_from=16, shards_to=64)

    await switch(manager_pool, bus, mint_above=mint_above)

    assert (await resize.current(pool)).switch_id == 901


async def test_a_switch_waits_for_the_commit_under_way_but_not_for_ever(
    pool: Pool, manager_pool: Pool, bus: Bus
) -> None:
    await resize.request(pool, 1, shards_from=16, shards_to=64)
    async with pool.acquire() as conn, conn.transaction():
        await conn.execute("SELECT FROM noetl.execution_shard WHERE shard_id = 3 FOR SHARE")

        assert not await switch(manager_pool, bus, mint_above=mint_above)

    assert (await resize.current(pool)).shard_count == 16
    assert await switch(manager_pool, bus, mint_above=mint_above)


async def test_a_wish_that_does_not_fit_any_more_is_refused_with_a_reason(
    pool: Pool, manager_pool: Pool, bus: Bus
) -> None:
    await resize.request(pool, 1, shards_from=16, shards_to=64)
    await write_setting(pool, "shard_count", 20)

    assert not await switch(manager_pool, bus, mint_above=mint_above)

    newest = await resize.newest(pool)
    assert newest is not None
    assert newest.refused == "there were 20 shards, not 16"
    assert newest.is_over


async def test_a_switch_with_nothing_to_project_is_drained_at_once(
    pool: Pool, manager_pool: Pool, bus: Bus
) -> None:
    await resize.request(pool, 1, shards_from=16, shards_to=64)
    await switch(manager_pool, bus, mint_above=mint_above)

    await clear_up(manager_pool, quiet_seconds=0)

    newest = await resize.newest(pool)
    assert newest is not None
    assert newest.drained_at is not None
