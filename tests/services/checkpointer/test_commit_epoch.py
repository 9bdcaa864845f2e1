"""The turns of the checkpointer: which barriers go out, and when an epoch is recorded."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import count

import pytest

from noetl_checkpointer.commit_epoch import (
    Progress,
    close_epoch,
    commit_epoch,
    watch_ages,
)
from noetl_checkpointer.config import CheckpointerConfig
from noetl_checkpointer.main import start
from noetl_core.bus.connection import Bus, open_bus
from noetl_core.domain.events import CheckpointCommitted, Event, StepEntered
from noetl_core.domain.ids import EpochId, EventId, ExecutionId, ShardId, StepName
from noetl_core.process.service import Service, serving
from noetl_core.store import checkpoint
from noetl_core.store.event import event_row
from noetl_core.store.postgres import Pool, open_pool
from noetl_core.wire.messages import Barrier, decode_messages
from noetl_core.wire.subjects import EPOCHS_CLOSE

SHARD = ShardId(3)


@pytest.fixture
async def checkpointer_pool(database: str) -> AsyncIterator[Pool]:
    async with open_pool(database, role="noetl_checkpointer", size_max=2) as opened:
        yield opened


@pytest.fixture
def ids() -> Iterator[int]:
    return count(1000)


async def append(
    pool: Pool, event_id: int, *, execution_id: int = 1, epoch: int = 0, shard: ShardId = SHARD
) -> None:
    """One event of a shard: the close of an epoch, or something else."""
    fact = (
        CheckpointCommitted(barrier=EpochId(epoch))
        if epoch
        else StepEntered(step=StepName("s"), visit=event_id)
    )
    happened = Event(execution_id=ExecutionId(execution_id), event_id=EventId(event_id), fact=fact)
    row = event_row(happened, shard_id=shard, epoch_id=None)
    await pool.execute(
        "INSERT INTO noetl.event"
        " (execution_id, event_id, event_key, shard_id, event_type, node_name, context)"
        " VALUES ($1, $2, $3, $4, $5, $6, $7)",
        row.execution_id,
        row.event_id,
        row.event_key,
        row.shard_id,
        row.event_type,
        row.node_name,
        row.context,
    )


async def project_to(pool: Pool, event_id: int, shard: ShardId = SHARD) -> None:
    await pool.execute(
        "INSERT INTO noetl.projection_checkpoint (shard_id, last_projected_event_id)"
        " VALUES ($1, $2) ON CONFLICT (shard_id) DO UPDATE SET last_projected_event_id = $2",
        shard,
        event_id,
    )


async def recorded(pool: Pool) -> list[tuple[int, int, int]]:
    rows = await pool.fetch(
        "SELECT execution_id, epoch, last_event_id FROM noetl.checkpoint ORDER BY 1, 2"
    )
    return [tuple(row) for row in rows]


class Heard:
    """The barriers that brokers would hear."""

    def __init__(self) -> None:
        self.barriers: list[tuple[int, int]] = []
        self._came = asyncio.Event()

    async def hear(self, body: bytes) -> None:
        for one in decode_messages(body):
            assert isinstance(one, Barrier)
            self.barriers.append((one.epoch, one.shard_id))
            self._came.set()

    async def until(self, count: int) -> list[tuple[int, int]]:
        async with asyncio.timeout(5):
            while len(self.barriers) < count:
                self._came.clear()
                await self._came.wait()
        return sorted(self.barriers)


@pytest.fixture
async def heard(bus: Bus) -> Heard:
    made = Heard()
    await bus.subscribe(EPOCHS_CLOSE, made.hear)
    return made


async def test_an_epoch_is_recorded_only_after_the_projection_passed_it(
    pool: Pool, checkpointer_pool: Pool
) -> None:
    progress = Progress()
    for event_id in (10, 11, 13):
        await append(pool, event_id)
    await append(pool, 12, epoch=500)

    assert await commit_epoch(checkpointer_pool, progress, batch_size=100) == 0
    await project_to(pool, 11)
    assert await commit_epoch(checkpointer_pool, progress, batch_size=100) == 0
    assert await recorded(pool) == []
    await project_to(pool, 12)
    assert await commit_epoch(checkpointer_pool, progress, batch_size=100) == 1

    assert await recorded(pool) == [(1, 500, 12)]


async def test_its_time_is_the_time_of_the_event(pool: Pool, checkpointer_pool: Pool) -> None:
    await append(pool, 12, epoch=500)
    await pool.execute("UPDATE noetl.event SET created_at = '2026-01-02 03:04:05Z'")
    await project_to(pool, 12)

    await commit_epoch(checkpointer_pool, Progress(), batch_size=100)

    found = await pool.fetchval("SELECT committed_at FROM noetl.checkpoint")
    assert found.isoformat() == "2026-01-02T03:04:05+00:00"


async def test_a_long_log_is_searched_in_pieces(pool: Pool, checkpointer_pool: Pool) -> None:
    for event_id in range(1, 31):
        await append(pool, event_id, execution_id=event_id, epoch=500 if event_id % 10 == 0 else 0)
    await project_to(pool, 30)
    progress = Progress()

    counts = [await commit_epoch(checkpointer_pool, progress, batch_size=8) for _ in range(5)]

    assert counts == [0, 1, 1, 1, 0]
    assert [one[0] for one in await recorded(pool)] == [10, 20, 30]


async def test_the_next_leader_goes_on_where_the_last_one_stopped(
    pool: Pool, checkpointer_pool: Pool
) -> None:
    for event_id in range(1, 5):
        await append(pool, event_id, execution_id=event_id, epoch=500)
    await project_to(pool, 4)
    await commit_epoch(checkpointer_pool, Progress(), batch_size=3)
    assert len(await recorded(pool)) == 3

    second = Progress()
    assert await commit_epoch(checkpointer_pool, second, batch_size=3) == 1

    assert await checkpoint.resume(pool, [SHARD]) == {SHARD: 4}
    assert [one[0] for one in await recorded(pool)] == [1, 2, 3, 4]


async def test_an_execution_keeps_its_last_two_epochs(pool: Pool, checkpointer_pool: Pool) -> None:
    progress = Progress()
    await append(pool, 1, execution_id=9, epoch=500)
    for event_id in range(2, 7):
        await append(pool, event_id, epoch=500 + event_id)
        await project_to(pool, event_id)
        await commit_epoch(checkpointer_pool, progress, batch_size=100)

    assert await recorded(pool) == [(1, 505, 5), (1, 506, 6), (9, 500, 1)]


async def test_a_checkpoint_without_an_epoch_stops_nothing(
    pool: Pool, checkpointer_pool: Pool
) -> None:
    await append(pool, 1, execution_id=9, epoch=500)
    await pool.execute("UPDATE noetl.event SET context = NULL")
    await append(pool, 2, execution_id=8, epoch=501)
    await append(pool, 3, execution_id=7, epoch=502)
    await pool.execute(
        """UPDATE noetl.event SET context = '{"barrier": "x"}' WHERE execution_id = 8"""
    )
    await project_to(pool, 3)

    assert await commit_epoch(checkpointer_pool, Progress(), batch_size=100) == 1
    assert await recorded(pool) == [(7, 502, 3)]


async def test_a_barrier_goes_to_every_shard_that_moved_and_to_no_other(
    pool: Pool, checkpointer_pool: Pool, bus: Bus, ids: Iterator[int], heard: Heard
) -> None:
    progress = Progress()
    await append(pool, 4, shard=ShardId(2))
    await append(pool, 5, shard=ShardId(3))

    async def turn() -> EpochId | None:
        return await close_epoch(checkpointer_pool, bus, progress, mint=lambda: next(ids))

    assert await turn() == 1000
    assert await turn() is None, "nothing moved"
    await append(pool, 6, shard=ShardId(3))
    assert await turn() == 1001

    assert await heard.until(3) == [(1000, 2), (1000, 3), (1001, 3)]


async def test_a_barrier_that_nats_did_not_take_is_sent_with_the_next_epoch(
    pool: Pool, checkpointer_pool: Pool, bus: Bus, ids: Iterator[int], heard: Heard
) -> None:
    progress = Progress()
    await append(pool, 5)
    async with open_bus("nats://127.0.0.1:1", name="away") as away:
        assert await close_epoch(checkpointer_pool, away, progress, mint=lambda: next(ids)) == 1000

    assert await close_epoch(checkpointer_pool, bus, progress, mint=lambda: next(ids)) == 1001

    assert await heard.until(1) == [(1001, SHARD)]


async def add_execution(pool: Pool, *, started: float, updated: float, status: str) -> None:
    await pool.execute(
        "INSERT INTO noetl.execution (execution_id, catalog_id, path, version, shard_id, status,"
        " state, ctx, progress, last_event_type, last_projected_event_id, started_at, updated_at)"
        " VALUES (1, 1, 'p', 1, $1, $2, '{}', '{}', '{}', 'step.enter', 1,"
        " now() - make_interval(secs => $3), now() - make_interval(secs => $4))",
        SHARD,
        status,
        started,
        updated,
    )


@pytest.mark.parametrize(
    ("started", "updated", "status", "committed", "age_seconds"),
    [
        (100, 1, "RUNNING", 60, 30),
        (100, 70, "RUNNING", 60, None),
        (100, 1, "COMPLETED", 60, None),
        (100, 1, "RUNNING", None, 40),
    ],
)
async def test_the_age_is_that_of_the_first_event_past_the_last_epoch(
    pool: Pool,
    checkpointer_pool: Pool,
    started: float,
    updated: float,
    status: str,
    committed: float | None,
    age_seconds: float | None,
) -> None:
    await add_execution(pool, started=started, updated=updated, status=status)
    for event_id, seconds in ((11, 40), (13, 30), (14, 1)):
        await append(pool, event_id)
        await pool.execute(
            "UPDATE noetl.event SET created_at = now() - make_interval(secs => $1)"
            " WHERE event_id = $2",
            seconds,
            event_id,
        )
    if committed is not None:
        await pool.execute(
            "INSERT INTO noetl.checkpoint VALUES"
            " (1, $1, 500, 12, now() - make_interval(secs => $2))",
            SHARD,
            committed,
        )

    found = await checkpoint.ages_ms(checkpointer_pool, [ShardId(2), SHARD])

    if age_seconds is None:
        assert found == {}
    else:
        assert set(found) == {SHARD}
        assert found[SHARD] == pytest.approx(age_seconds * 1000, abs=5000)


async def test_the_service_closes_and_records(
    pool: Pool, database: str, nats_url: str, heard: Heard
) -> None:
    await append(pool, 12, epoch=500)
    await project_to(pool, 12)
    config = CheckpointerConfig(postgres_dsn=database, nats_url=nats_url)
    async with serving(Service("checkpointer", config), start):
        pass  # each loop has its first turn

    assert [shard for _, shard in await heard.until(1)] == [SHARD]
    assert await recorded(pool) == [(1, 500, 12)]


async def test_a_shard_that_missed_its_barrier_gets_another(
    pool: Pool, checkpointer_pool: Pool, bus: Bus, ids: Iterator[int], heard: Heard
) -> None:
    progress = Progress()
    await append(pool, 5)
    await add_execution(pool, started=100, updated=1, status="RUNNING")
    await close_epoch(checkpointer_pool, bus, progress, mint=lambda: next(ids))
    assert await close_epoch(checkpointer_pool, bus, progress, mint=lambda: next(ids)) is None
    await pool.execute("UPDATE noetl.event SET created_at = now() - interval '1 minute'")

    await watch_ages(checkpointer_pool, progress)

    assert await close_epoch(checkpointer_pool, bus, progress, mint=lambda: next(ids)) == 1001
    assert await heard.until(2) == [(1000, SHARD), (1001, SHARD)]
