"""A key stands for one execution, whoever asks, however many at once, whatever dies."""

import asyncio

import pytest

from noetl_core.domain.ids import ExecutionId
from noetl_core.store import idempotency
from noetl_core.store.idempotency import Keyed
from noetl_core.store.postgres import Pool


def wanted(number: int) -> Keyed:
    return Keyed(ExecutionId(number), b"fingerprint")


async def claim(pool: Pool, number: int) -> Keyed:
    async with pool.acquire() as conn, conn.transaction():
        return await idempotency.claim(conn, "key", wanted(number))


async def test_the_first_request_has_the_key_and_later_ones_find_it(pool: Pool) -> None:
    assert [(await claim(pool, number)).execution_id for number in (1, 2, 3)] == [1, 1, 1]


async def test_of_many_requests_at_once_one_gets_the_key(pool: Pool) -> None:
    claimed = await asyncio.gather(*(claim(pool, number) for number in range(1, 16)))

    assert len({one.execution_id for one in claimed}) == 1


async def test_a_second_request_waits_for_the_first_to_commit_or_roll_back(pool: Pool) -> None:
    async with pool.acquire() as conn:
        first = conn.transaction()
        await first.start()
        await idempotency.claim(conn, "key", wanted(1))
        second = asyncio.create_task(claim(pool, 2))
        await asyncio.sleep(0.1)
        assert not second.done()

        await first.rollback()

    assert (await second).execution_id == 2


async def test_a_request_that_died_before_its_commit_leaves_the_key_free(pool: Pool) -> None:
    async def dies() -> None:
        async with pool.acquire() as conn, conn.transaction():
            await idempotency.claim(conn, "key", wanted(1))
            raise ConnectionError

    with pytest.raises(ConnectionError):
        await dies()

    assert (await claim(pool, 2)).execution_id == 2
