"""store/resize.py: wishes, the boundary in the log, and shards that are set aside."""

import asyncio

import pytest

from noetl_core.domain.errors import ConflictError
from noetl_core.domain.ids import EventId, RuntimeId, ShardId
from noetl_core.store import execution_shard, inbox, resize
from noetl_core.store.postgres import Pool


async def switched(pool: Pool, count_from: int, count_to: int, *, switch_id: int) -> None:
    await resize.request(pool, switch_id, shards_from=count_from, shards_to=count_to)
    async with pool.acquire() as conn, conn.transaction():
        wish = await resize.open_wish(conn, is_locked=True)
        assert wish is not None
        await execution_shard.lock_all(conn)
        await execution_shard.begin_anew(conn, shard_count=count_to)
        await resize.record_switch(conn, wish, EventId(switch_id))


async def append(pool: Pool, shard: int, event_id: int) -> None:
    await pool.execute(
        "INSERT INTO noetl.event (execution_id, event_id, event_key, shard_id, event_type)"
        " VALUES (1, $2::bigint, $2::bigint::text, $1, 'step.enter')",
        shard,
        event_id,
    )


async def project_to(pool: Pool, shard: int, event_id: int) -> None:
    await pool.execute(
        "INSERT INTO noetl.projection_checkpoint (shard_id, last_projected_event_id)"
        " VALUES ($1, $2)"
        " ON CONFLICT (shard_id) DO UPDATE SET last_projected_event_id = $2",
        shard,
        event_id,
    )


async def test_a_wish_from_a_count_that_is_not_the_present_one_is_refused(pool: Pool) -> None:
    with pytest.raises(ConflictError, match="there are 16 shards, not 8"):
        await resize.request(pool, 1, shards_from=8, shards_to=64)


async def test_of_two_wishes_at_once_one_is_refused(pool: Pool) -> None:
    answers = await asyncio.gather(
        *(resize.request(pool, n, shards_from=16, shards_to=32 + n) for n in (1, 2)),
        return_exceptions=True,
    )

    assert [type(answer) for answer in answers if answer is not None] == [ConflictError]


async def test_another_change_has_to_wait_until_the_last_one_is_drained(pool: Pool) -> None:
    await append(pool, 3, 10)
    await switched(pool, 16, 64, switch_id=100)
    assert not await resize.mark_drained(pool)
    with pytest.raises(ConflictError, match="still under way"):
        await resize.request(pool, 2, shards_from=64, shards_to=16)

    await project_to(pool, 3, 10)

    assert await resize.mark_drained(pool)
    await resize.request(pool, 2, shards_from=64, shards_to=16)


async def test_without_a_change_there_is_no_boundary(pool: Pool) -> None:
    await append(pool, 3, 10)

    assert await resize.next_boundary(pool) is None


async def test_the_boundary_stands_until_every_shard_has_been_projected_up_to_it(
    pool: Pool,
) -> None:
    await append(pool, 3, 10)
    await append(pool, 7, 11)
    await switched(pool, 16, 64, switch_id=100)
    await append(pool, 35, 101)

    await project_to(pool, 3, 10)
    before = await resize.next_boundary(pool)
    await project_to(pool, 7, 11)

    assert before == 100
    assert await resize.next_boundary(pool) is None


async def test_a_replay_from_the_beginning_meets_the_boundaries_in_order(pool: Pool) -> None:
    await append(pool, 3, 10)
    await switched(pool, 16, 64, switch_id=100)
    await append(pool, 35, 101)
    await project_to(pool, 3, 10)
    await resize.mark_drained(pool)
    await switched(pool, 64, 16, switch_id=200)
    await project_to(pool, 35, 101)
    assert await resize.next_boundary(pool) is None

    await pool.execute("TRUNCATE noetl.projection_checkpoint")
    first = await resize.next_boundary(pool)
    await project_to(pool, 3, 10)
    second = await resize.next_boundary(pool)

    assert (first, second) == (100, 200)


async def test_a_dropped_shard_is_set_aside_only_when_nothing_names_it(pool: Pool) -> None:
    await switched(pool, 16, 64, switch_id=100)
    await resize.mark_drained(pool)
    await append(pool, 40, 101)
    await inbox.put(pool, ShardId(41), b"letter")
    await switched(pool, 64, 16, switch_id=200)

    too_early = await execution_shard.retire(pool, quiet_seconds=3600)
    first = await execution_shard.retire(pool, quiet_seconds=0)
    await project_to(pool, 40, 101)
    await pool.execute("DELETE FROM noetl.inbox")
    second = await execution_shard.retire(pool, quiet_seconds=0)

    assert too_early == []
    assert first == [shard for shard in range(16, 64) if shard not in (40, 41)]
    assert second == [40, 41]
    assert len(await execution_shard.look(pool, "broker")) == 16


async def test_a_shard_that_comes_back_goes_on_with_its_epoch(pool: Pool) -> None:
    """Or the fence of whoever held it long ago would fit again."""
    await switched(pool, 16, 64, switch_id=100)
    claims = await execution_shard.claim(
        pool, "broker", RuntimeId(1), instance="b", lease_seconds=30, limit=64
    )
    await resize.mark_drained(pool)
    await switched(pool, 64, 16, switch_id=200)
    await execution_shard.retire(pool, quiet_seconds=0)
    await resize.mark_drained(pool)

    await switched(pool, 16, 64, switch_id=300)

    rows = {row.shard_id: row.epoch for row in await execution_shard.look(pool, "broker")}
    assert len(rows) == 64
    assert all(rows[claim.shard_id] > claim.epoch for claim in claims)


async def test_the_count_and_the_switch_are_read_together(pool: Pool) -> None:
    assert await resize.current(pool) == (16, 0)

    await switched(pool, 16, 64, switch_id=100)

    assert await resize.current(pool) == (64, 100)
