"""How much a batch takes, and what goes past everything that waits."""

import asyncio
from typing import Any

import pytest

from noetl_broker.intake import Intake
from noetl_broker.portion import BYTES_FIRST, BYTES_MIN, TURN_SECONDS, Portion
from noetl_core.bus.connection import Bus
from noetl_core.bus.consume import Delivery
from noetl_core.domain.ids import EpochId, ShardId
from noetl_core.store import inbox
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Barrier, decode_messages, encode_messages

SHARD = ShardId(3)


def intake(pool: Pool, bus: Bus, *sizes: int) -> Intake:
    """With deliveries of these sizes that wait."""
    queue: asyncio.Queue[Delivery] = asyncio.Queue()
    for size in sizes:
        queue.put_nowait(Delivery(SHARD, bytes(size), bus, ""))
    return Intake(
        pool, queue, held=lambda: {SHARD: 1}, batch_size=100, inbox_poll_seconds=lambda: 0.05
    )


async def test_a_batch_is_no_larger_than_its_portion(pool: Pool, bus: Bus) -> None:
    half = BYTES_FIRST // 2
    waiting = intake(pool, bus, half, half, half)

    first, _ = await waiting.next_batch()
    second, _ = await waiting.next_batch()

    assert [len(letter.body) for letter in first] == [half, half]
    assert [len(letter.body) for letter in second] == [half]


async def test_one_body_that_is_larger_than_a_portion_is_taken_alone(pool: Pool, bus: Bus) -> None:
    waiting = intake(pool, bus, BYTES_FIRST * 2, 1)

    letters, _ = await waiting.next_batch()

    assert [len(letter.body) for letter in letters] == [BYTES_FIRST * 2]


async def test_of_the_inbox_no_more_is_taken_than_a_portion_and_the_rest_at_once(
    pool: Pool, bus: Bus
) -> None:
    waiting = intake(pool, bus)
    waiting._inbox_poll_seconds = lambda: 3600.0
    for _ in range(3):
        await inbox.put(pool, SHARD, bytes(BYTES_FIRST))

    taken = []
    for _ in range(3):
        letters, _ = await waiting.next_batch()
        await inbox.delete(pool, [one.inbox_id for one in letters if one.inbox_id is not None])
        taken.append(len(letters))

    assert taken == [1, 1, 1]


async def test_a_barrier_goes_past_a_backlog_and_once(pool: Pool, bus: Bus) -> None:
    waiting = intake(pool, bus, BYTES_FIRST, BYTES_FIRST)
    older, newer = (Barrier(shard_id=SHARD, epoch=EpochId(number)) for number in (1, 2))

    await waiting.close_epochs(encode_messages([older]))
    await waiting.close_epochs(encode_messages([newer]))
    first, _ = await waiting.next_batch()
    second, _ = await waiting.next_batch()

    assert list(decode_messages(first[-1].body)) == [newer]
    assert len(first) == 2
    assert len(second) == 1


async def test_a_barrier_wakes_a_broker_that_has_nothing_to_do(pool: Pool, bus: Bus) -> None:
    waiting = intake(pool, bus)
    await waiting.next_batch()
    asked = asyncio.create_task(waiting.next_batch())

    await waiting.close_epochs(encode_messages([Barrier(shard_id=SHARD, epoch=EpochId(1))]))

    letters, _ = await asyncio.wait_for(asked, 60)
    assert [letter.shard_id for letter in letters] == [SHARD]


async def test_a_barrier_of_somebody_elses_shard_is_no_letter(pool: Pool, bus: Bus) -> None:
    waiting = intake(pool, bus)

    other = ShardId(SHARD + 1)
    await waiting.close_epochs(encode_messages([Barrier(shard_id=other, epoch=EpochId(1))]))

    assert (await waiting.next_batch())[0] == []


class BrokenPool:
    """Postgres is away for a while."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.is_away = True

    async def fetch(self, *arguments: Any) -> Any:
        if self.is_away:
            raise ConnectionRefusedError("away")
        return await self._pool.fetch(*arguments)


async def test_what_was_delivered_survives_an_inbox_that_cannot_be_read(
    pool: Pool, bus: Bus
) -> None:
    broken: Any = BrokenPool(pool)
    waiting = intake(broken, bus, 1, 2)
    await inbox.put(pool, SHARD, b"promised")

    with pytest.raises(ConnectionRefusedError):
        await waiting.next_batch()
    broken.is_away = False
    letters, deliveries = await waiting.next_batch()

    assert [len(delivery.body) for delivery in deliveries] == [1, 2]
    assert [letter.body for letter in letters] == [bytes(1), bytes(2), b"promised"]


async def test_the_inbox_is_read_without_a_call_however_much_comes_by_nats(
    pool: Pool, bus: Bus
) -> None:
    waiting = intake(pool, bus)
    await waiting.next_batch()
    await inbox.put(pool, SHARD, b"promised")

    found: list[bytes] = []
    async with asyncio.timeout(60):
        while b"promised" not in found:
            waiting._deliveries.put_nowait(Delivery(SHARD, b"steady", bus, ""))
            letters, _ = await waiting.next_batch()
            found = [letter.body for letter in letters]
            await asyncio.sleep(0.001)


async def test_what_is_no_barrier_is_no_letter(pool: Pool, bus: Bus) -> None:
    waiting = intake(pool, bus)

    await waiting.close_epochs(b"\xc1 no message")

    assert (await waiting.next_batch())[0] == []


def test_a_slow_batch_makes_the_next_one_smaller_and_quick_ones_larger_again() -> None:
    portion = Portion()

    portion.learn(size=BYTES_FIRST, seconds=TURN_SECONDS * 2)
    assert portion.bytes_max == BYTES_FIRST // 2
    portion.learn(size=BYTES_FIRST, seconds=3600)
    assert portion.bytes_max == BYTES_MIN
    portion.learn(size=10, seconds=0.001)
    assert portion.bytes_max == BYTES_MIN, "a small batch says nothing of a large one"
    portion.learn(size=BYTES_MIN, seconds=0.001)
    assert portion.bytes_max == BYTES_MIN * 2
