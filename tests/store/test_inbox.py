"""What is in the inbox stays there, in order, until a commit takes it."""

import asyncpg
import pytest

from noetl_core.domain.ids import ExecutionId, ShardId
from noetl_core.domain.sharding import SHARD_COUNT_DEFAULT, shard_of
from noetl_core.store import inbox, setting
from noetl_core.store.postgres import Pool, open_pool

ALL_SHARDS = [ShardId(number) for number in range(SHARD_COUNT_DEFAULT)]


@pytest.mark.parametrize("execution_id", [1, 4711, 727_817_237_812_776_960, 2**63 - 1])
async def test_a_promise_goes_to_the_shard_of_its_execution(pool: Pool, execution_id: int) -> None:
    shard = await inbox.promise(pool, ExecutionId(execution_id), b"body")

    assert shard == shard_of(ExecutionId(execution_id), shard_count=SHARD_COUNT_DEFAULT)
    assert [row.body for row in await inbox.waiting(pool, [shard], limit=10)] == [b"body"]


async def test_a_promise_follows_the_shard_count_at_once(pool: Pool) -> None:
    execution_id = ExecutionId(4711)
    await setting.write_setting(pool, "shard_count", 7)

    shard = await inbox.promise(pool, execution_id, b"body")

    assert shard == shard_of(execution_id, shard_count=7)


async def test_rows_of_the_asked_shards_come_oldest_first(pool: Pool) -> None:
    for shard, body in ((1, b"a"), (2, b"b"), (3, b"other"), (1, b"c"), (2, b"d")):
        await inbox.put(pool, ShardId(shard), body)

    rows = await inbox.waiting(pool, [ShardId(2), ShardId(1)], limit=3)

    assert [row.body for row in rows] == [b"a", b"b", b"c"]
    assert [row.shard_id for row in rows] == [1, 2, 1]


async def test_no_more_is_read_than_fits_but_always_one(pool: Pool) -> None:
    """500 rows of the largest payload would not fit into a broker."""
    for size in (30, 80, 10):
        await inbox.put(pool, ShardId(1), bytes(size))

    async def sizes(bytes_max: int) -> list[int]:
        rows = await inbox.waiting(pool, [ShardId(1)], limit=10, bytes_max=bytes_max)
        return [len(row.body) for row in rows]

    assert await sizes(1) == [30]
    assert await sizes(30) == [30]
    assert await sizes(31) == [30, 80]
    assert await sizes(1000) == [30, 80, 10]


async def test_a_row_stays_until_it_is_deleted(pool: Pool) -> None:
    await inbox.put(pool, ShardId(0), b"parked")
    await inbox.put(pool, ShardId(0), b"kept")
    first, _ = await inbox.waiting(pool, ALL_SHARDS, limit=10)

    await inbox.delete(pool, [first.inbox_id])

    assert [row.body for row in await inbox.waiting(pool, ALL_SHARDS, limit=10)] == [b"kept"]


async def test_the_gateway_may_promise_and_look_but_not_take(database: str) -> None:
    async with open_pool(database, role="noetl_api_gateway", size_max=1) as gateway:
        await inbox.promise(gateway, ExecutionId(1), b"body")
        (row,) = await inbox.waiting(gateway, ALL_SHARDS, limit=10)

        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await inbox.delete(gateway, [row.inbox_id])
