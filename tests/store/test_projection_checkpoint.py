"""Why `event_id > watermark` skips nothing: the hazard without the fence, and the fence.

Ids are made before they commit. If two writers could append to a shard at once, the one with the
larger id might commit first, the watermark would pass the other's id, and its event would never be
projected. The broker's fence is what forbids the second writer.
"""

from collections.abc import Collection, Mapping
from typing import Any

import asyncpg
import pytest

from noetl_core.domain.events import Event, ExecutionStarted
from noetl_core.domain.ids import CatalogId, EventId, ExecutionId, RuntimeId, ShardId
from noetl_core.store import batch as batches
from noetl_core.store import event, execution_shard, projection_checkpoint
from noetl_core.store.batch import Batch
from noetl_core.store.event import EventRow, event_row
from noetl_core.store.postgres import Connection, Pool
from noetl_projection.memory import Memory
from noetl_projection.project import project

SHARD = ShardId(5)


class Held:
    def held(self) -> Mapping[ShardId, int]:
        return {SHARD: 0}

    def claimed(self) -> Collection[ShardId]:
        return [SHARD]

    async def lost(self, shard_ids: Collection[ShardId]) -> None:
        raise AssertionError(shard_ids)


def started(number: int) -> EventRow:
    """The start of execution `number`, with `number` as the id of its event."""
    fact = ExecutionStarted(catalog_id=CatalogId(1), path="p", version=1)
    happened = Event(execution_id=ExecutionId(number), event_id=EventId(number), fact=fact)
    return event_row(happened, shard_id=SHARD, epoch_id=None)


async def append_unfenced(conn: Connection | Pool, number: int) -> None:
    row = started(number)
    await conn.execute(
        "INSERT INTO noetl.event"
        " (execution_id, event_id, event_key, shard_id, event_type, catalog_id, context)"
        " VALUES ($1, $2, $3, $4, $5, $6, $7)",
        row.execution_id,
        row.event_id,
        row.event_key,
        row.shard_id,
        row.event_type,
        row.catalog_id,
        row.context,
    )


async def append_fenced(conn: Connection, number: int, *, epoch: int) -> None:
    batch = Batch()
    batch.fences[SHARD] = epoch
    batch.events.append(started(number))
    await batches.commit(conn, batch)


async def claim(pool: Pool, owner: int) -> list[execution_shard.Claim]:
    return await execution_shard.claim(
        pool, "broker", RuntimeId(owner), instance=f"b{owner}", lease_seconds=30, limit=16
    )


async def projected(pool: Pool) -> list[int]:
    while await project(pool, Held(), Memory(executions_max=10), batch_size=10):
        pass
    rows = await pool.fetch("SELECT execution_id FROM noetl.execution ORDER BY 1")
    return [row["execution_id"] for row in rows]


async def test_a_shard_without_a_row_starts_at_zero(pool: Pool) -> None:
    await pool.execute("INSERT INTO noetl.projection_checkpoint VALUES (5, 77)")

    found = await projection_checkpoint.watermarks(pool, [ShardId(4), SHARD])

    assert found == {4: 0, 5: 77}


async def test_two_writers_without_a_fence_make_the_watermark_skip_an_event(pool: Pool) -> None:
    async with pool.acquire() as slow:
        transaction = slow.transaction()
        await transaction.start()
        await append_unfenced(slow, 10)
        await append_unfenced(pool, 11)
        assert await projected(pool) == [11]
        await transaction.commit()

    assert await projected(pool) == [11], "event 10 is in the log and will never be projected"
    assert await projection_checkpoint.watermarks(pool, [SHARD]) == {SHARD: 11}


async def test_with_the_fence_a_new_owner_cannot_write_before_the_old_ones_commit(
    pool: Pool,
) -> None:
    epochs = dict(await claim(pool, 1))
    await pool.execute("UPDATE noetl.execution_shard SET leased_until = now() - interval '1 s'")
    async with pool.acquire() as slow:
        transaction = slow.transaction()
        await transaction.start()
        await append_fenced(slow, 10, epoch=epochs[SHARD])

        early = await claim(pool, 2)
        assert SHARD not in [one.shard_id for one in early], "taken in the middle of a commit"
        assert await projected(pool) == []
        await transaction.commit()

    late = await claim(pool, 2)
    assert [one.shard_id for one in late] == [SHARD]
    assert await event.newest_event_id(pool, [SHARD]) == 10, "the new owner mints above this"
    await append_fenced(pool, 11, epoch=late[0].epoch)  # type: ignore[arg-type]
    assert await projected(pool) == [10, 11]


async def test_the_old_owner_cannot_append_behind_the_watermark(pool: Pool) -> None:
    """It slept through its lease with an id already made."""
    old = dict(await claim(pool, 1))[SHARD]
    await pool.execute("UPDATE noetl.execution_shard SET leased_until = now() - interval '1 s'")
    new = dict(await claim(pool, 2))[SHARD]
    await append_fenced(pool, 11, epoch=new)  # type: ignore[arg-type]
    assert await projected(pool) == [11]

    with pytest.raises(asyncpg.PostgresError) as refused:
        await append_fenced(pool, 10, epoch=old)  # type: ignore[arg-type]

    assert batches.is_fenced(refused.value)
    assert await projected(pool) == [11]
    assert await pool.fetchval("SELECT count(*) FROM noetl.event") == 1


async def test_a_claim_that_waits_for_the_row_sees_what_the_old_owner_wrote(pool: Pool) -> None:
    """FOR SHARE blocks any change of the fence row, not only a polite SKIP LOCKED."""
    epochs = dict(await claim(pool, 1))
    async with pool.acquire() as slow, pool.acquire() as other:
        await other.execute("SET lock_timeout = '100ms'")
        async with slow.transaction():
            await append_fenced(slow, 10, epoch=epochs[SHARD])
            with pytest.raises(asyncpg.LockNotAvailableError):
                await raise_epoch(other)
        await raise_epoch(other)
        assert await other.fetchval("SELECT count(*) FROM noetl.event") == 1


async def raise_epoch(conn: Any) -> None:
    await conn.execute(
        "UPDATE noetl.execution_shard SET epoch = epoch + 1"
        " WHERE role = 'broker' AND shard_id = $1",
        SHARD,
    )
