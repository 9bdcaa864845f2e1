"""store/leader.py: one owner at a time, and an epoch that rises with every change."""

import asyncio

from noetl_core.domain.ids import RuntimeId
from noetl_core.store.leader import acquire, release
from noetl_core.store.postgres import Pool

FIRST, SECOND = RuntimeId(1), RuntimeId(2)


async def lapse(pool: Pool) -> None:
    await pool.execute("UPDATE noetl.leader SET leased_until = now() - interval '1 second'")


async def test_of_two_that_ask_at_once_one_gets_the_role(pool: Pool) -> None:
    answers = await asyncio.gather(
        *(acquire(pool, "reaper", RuntimeId(i), lease_seconds=30) for i in range(8))
    )

    assert sorted(a is None for a in answers) == [False] + [True] * 7


async def test_renewing_keeps_the_epoch_and_a_takeover_raises_it(pool: Pool) -> None:
    first = await acquire(pool, "reaper", FIRST, lease_seconds=30)
    renewed = await acquire(pool, "reaper", FIRST, lease_seconds=30)
    await lapse(pool)
    taken = await acquire(pool, "reaper", SECOND, lease_seconds=30)

    assert (first, renewed, taken) == (1, 1, 2)


async def test_a_released_role_is_free_at_once(pool: Pool) -> None:
    await acquire(pool, "reaper", FIRST, lease_seconds=30)

    await release(pool, "reaper", FIRST)

    assert await acquire(pool, "reaper", SECOND, lease_seconds=30) == 2


async def test_nobody_releases_the_role_of_another(pool: Pool) -> None:
    await acquire(pool, "reaper", FIRST, lease_seconds=30)

    await release(pool, "reaper", SECOND)

    assert await acquire(pool, "reaper", SECOND, lease_seconds=30) is None
