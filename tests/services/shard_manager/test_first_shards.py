"""NOETL_SHARD_COUNT: how many shards a new system has, and nothing else."""

import itertools

from noetl_core.bus.connection import Bus
from noetl_core.store import resize
from noetl_core.store.postgres import Pool
from noetl_shard_manager.switch import switch, wish_for_first

_ids = itertools.count(1_000_000)


def mint() -> int:
    return next(_ids)


async def configured(pool: Pool, bus: Bus, count: int) -> int:
    """The number of shards after a turn of a shard-manager with this setting."""
    await wish_for_first(pool, shard_count=count, mint=mint)
    await switch(pool, bus, mint_above=lambda floor: max(floor, mint()) + 1)
    await resize.mark_drained(pool)
    return (await resize.current(pool)).shard_count


async def test_a_new_system_gets_the_configured_shards(manager_pool: Pool, bus: Bus) -> None:
    assert await configured(manager_pool, bus, 24) == 24


async def test_as_many_as_there_are_is_no_change(manager_pool: Pool, bus: Bus) -> None:
    assert await configured(manager_pool, bus, 16) == 16
    assert await resize.newest(manager_pool) is None


async def test_a_system_that_was_resized_keeps_its_shards_whatever_is_configured(
    manager_pool: Pool, bus: Bus
) -> None:
    await configured(manager_pool, bus, 24)

    assert await configured(manager_pool, bus, 8) == 24
