"""A key stands for one execution, whoever asks, however many at once, whatever dies."""

import asyncio

import pytest

from noetl_core.domain.ids import ExecutionId, ShardId
from noetl_core.domain.sharding import SHARD_COUNT_DEFAULT, shard_of
from noetl_core.store import idempotency, inbox
from noetl_core.store.idempotency import Keyed
from noetl_core.store.postgres import Connection, Pool

ALL_SHARDS = [ShardId(number) for number in range(SHARD_COUNT_DEFAULT)]


async def promise(conn: Connection | Pool, number: int) -> ShardId | None:
    wanted = Keyed(ExecutionId(number), b"fingerprint")
    return await idempotency.promise_once(conn, "key", wanted, b"%d" % number)


async def promised(pool: Pool) -> list[bytes]:
    return [row.body for row in await inbox.waiting(pool, ALL_SHARDS, limit=100)]


async def test_the_first_request_has_the_key_and_later_ones_write_nothing(pool: Pool) -> None:
    shards = [await promise(pool, number) for number in (1, 2, 3)]

    first = shard_of(ExecutionId(1), shard_count=SHARD_COUNT_DEFAULT)
    assert shards == [first, None, None]
    assert await idempotency.find(pool, "key") == Keyed(ExecutionId(1), b"fingerprint")
    assert await idempotency.find(pool, "another") is None
    assert await promised(pool) == [b"1"]


async def test_of_many_requests_at_once_one_gets_the_key(pool: Pool) -> None:
    shards = await asyncio.gather(*(promise(pool, number) for number in range(1, 16)))

    assert sum(shard is not None for shard in shards) == 1
    assert len(await promised(pool)) == 1


async def test_a_second_request_waits_for_the_first_to_commit_or_roll_back(pool: Pool) -> None:
    async with pool.acquire() as conn:
        first = conn.transaction()
        await first.start()
        await promise(conn, 1)
        second = asyncio.create_task(promise(pool, 2))
        await asyncio.sleep(0.1)
        assert not second.done()

        await first.rollback()

    assert await second is not None
    assert await promised(pool) == [b"2"]


async def test_a_request_that_died_before_its_commit_leaves_the_key_free(pool: Pool) -> None:
    async def dies() -> None:
        async with pool.acquire() as conn, conn.transaction():
            await promise(conn, 1)
            raise ConnectionError

    with pytest.raises(ConnectionError):
        await dies()

    assert await promise(pool, 2) is not None
    assert await promised(pool) == [b"2"]
