"""The turns of the checkpointer: which barriers go out, and when an epoch is recorded."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import count
from typing import Any

import msgspec
import pytest

from noetl_checkpointer import commit_epoch as commit_epoch_module
from noetl_checkpointer.commit_epoch import (
    Progress,
    close_epoch,
    commit_epoch,
    forget_ended,
    watch_ages,
)
from noetl_checkpointer.config import CheckpointerConfig
from noetl_checkpointer.main import start
from noetl_core.bus.connection import Bus, open_bus
from noetl_core.domain.events import CheckpointCommitted, Event, StepEntered
from noetl_core.domain.ids import EpochId, EventId, ExecutionId, ShardId, StepName
from noetl_core.domain.sharding import shard_of
from noetl_core.domain.snowflake import EPOCH_MS, Snowflake
from noetl_core.process.service import Service, serving
from noetl_core.store import checkpoint
from noetl_core.store.event import event_row
from noetl_core.store.postgres import Pool, open_pool
from noetl_core.wire.messages import Barrier, decode_messages
from noetl_core.wire.subjects import EPOCHS_CLOSE, EPOCHS_PROJECTED

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
        async with asyncio.timeout(60):
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


async def test_many_closes_are_recorded_in_pieces(pool: Pool, checkpointer_pool: Pool) -> None:
    for event_id in range(1, 31):
        await append(pool, event_id, execution_id=event_id, epoch=500 if event_id % 5 == 0 else 0)
    await project_to(pool, 30)
    progress = Progress()

    counts = [await commit_epoch(checkpointer_pool, progress, batch_size=2) for _ in range(5)]

    assert counts == [2, 2, 2, 0, 0]
    assert [one[0] for one in await recorded(pool)] == [5, 10, 15, 20, 25, 30]
    assert progress.searched[SHARD] == 30


async def scanned(pool: Pool, sql: str, *arguments: Any) -> dict[str, int]:
    """How many rows a statement has read, by index or table."""
    async with pool.acquire() as conn:
        answer = await conn.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", *arguments)
    read: dict[str, int] = {}

    def visit(node: dict[str, Any]) -> None:
        name = node.get("Index Name") or node.get("Relation Name")
        if name and node["Node Type"].endswith("Scan"):
            rows = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
            read[name] = read.get(name, 0) + int(rows * node["Actual Loops"])
        for child in node.get("Plans", ()):
            visit(child)

    visit(msgspec.json.decode(answer)[0]["Plan"])
    return read


async def test_recording_reads_the_closes_of_epochs_and_nothing_else_of_the_log(
    pool: Pool, checkpointer_pool: Pool
) -> None:
    await pool.execute(
        "INSERT INTO noetl.event"
        " (execution_id, event_id, event_key, shard_id, event_type, context)"
        " SELECT 1, i, i, $1, CASE i % 1000 WHEN 0 THEN 'checkpoint.committed' ELSE 'call.done'"
        " END, jsonb_build_object('barrier', i) FROM generate_series(1, 20000) AS i",
        SHARD,
    )
    await pool.execute("ANALYZE noetl.event")
    await project_to(pool, 20_000)

    read = await scanned(pool, checkpoint._RECORD, [SHARD], [0], 100)

    assert sum(rows for name, rows in read.items() if name.startswith("event")) == 20
    assert await pool.fetchval("SELECT count(*) FROM noetl.checkpoint") == 20
    idle = await scanned(pool, checkpoint._RECORD, [SHARD], [20_000], 100)
    assert not any(rows for name, rows in idle.items() if name.startswith("event"))


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
    await append(pool, 4, execution_id=6, epoch=503)
    for execution_id, barrier in ((8, "x"), (6, "9" * 19)):
        await pool.execute(
            "UPDATE noetl.event SET context = jsonb_build_object('barrier', $2::text)"
            " WHERE execution_id = $1",
            execution_id,
            barrier,
        )
    await project_to(pool, 4)

    assert await commit_epoch(checkpointer_pool, Progress(), batch_size=100) == 1
    assert await recorded(pool) == [(7, 502, 3)]


async def test_a_barrier_goes_to_every_shard_that_moved_and_to_no_other(
    pool: Pool, checkpointer_pool: Pool, bus: Bus, ids: Iterator[int], heard: Heard
) -> None:
    progress = Progress()
    await append(pool, 4, shard=ShardId(2))
    await append(pool, 5, shard=ShardId(3))

    async def turn() -> EpochId | None:
        return await close_epoch(
            checkpointer_pool, bus, progress, mint_above=lambda _floor: next(ids)
        )

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
        assert (
            await close_epoch(
                checkpointer_pool, away, progress, mint_above=lambda _floor: next(ids)
            )
            == 1000
        )

    assert (
        await close_epoch(checkpointer_pool, bus, progress, mint_above=lambda _floor: next(ids))
        == 1001
    )

    assert await heard.until(1) == [(1001, SHARD)]


async def add_execution(
    pool: Pool, *, status: str, execution_id: int = 1, last_event_id: int = 1
) -> None:
    await pool.execute(
        "INSERT INTO noetl.execution (execution_id, catalog_id, path, version, shard_id, status,"
        " state, ctx, progress, last_event_type, last_projected_event_id, started_at, updated_at)"
        " VALUES ($1, 1, 'p', 1, $2, $3, '{}', '{}', '{}', 'step.enter', $4, now(), now())",
        execution_id,
        SHARD,
        status,
        last_event_id,
    )


async def ages_ms(pool: Pool, *shards: ShardId) -> dict[ShardId, float]:
    found = await checkpoint.ages(pool, dict.fromkeys(shards, EventId(0)), limit=100)
    return found.ages_ms


@pytest.mark.parametrize(
    ("covered_to", "status", "projected_to", "age_seconds"),
    [
        (12, "RUNNING", 14, 30),
        (12, "PAUSED", 14, 30),
        (14, "RUNNING", 14, None),
        (12, "COMPLETED", 14, None),
        (12, "COMPLETED", 13, 1),
        (None, "RUNNING", 14, 40),
    ],
    ids=[
        "it goes on",
        "it goes on when it is resumed",
        "nothing moved since the epoch",
        "it has ended",
        "whether it has ended is not projected yet",
        "there is no epoch",
    ],
)
async def test_the_age_is_that_of_the_first_event_past_the_last_epoch(
    pool: Pool,
    checkpointer_pool: Pool,
    covered_to: int | None,
    status: str,
    projected_to: int,
    age_seconds: float | None,
) -> None:
    await add_execution(pool, status=status, last_event_id=projected_to)
    await project_to(pool, projected_to)
    for event_id, seconds in ((11, 40), (13, 30), (14, 1)):
        await append(pool, event_id)
        await make_older(pool, event_id, seconds)
    if covered_to is not None:
        await pool.execute(
            "INSERT INTO noetl.checkpoint VALUES (1, $1, 500, $2, now() - interval '1 hour')",
            SHARD,
            covered_to,
        )

    found = await ages_ms(checkpointer_pool, ShardId(2), SHARD)

    if age_seconds is None:
        assert found == {}
    else:
        assert set(found) == {SHARD}
        assert found[SHARD] == pytest.approx(age_seconds * 1000, abs=5000)


async def test_what_moved_to_another_shard_has_no_age_once_it_has_a_newer_epoch_there(
    pool: Pool, checkpointer_pool: Pool
) -> None:
    await add_execution(pool, status="RUNNING")
    await append(pool, 11)
    await make_older(pool, 11, 30)
    await project_to(pool, 11)
    assert set(await ages_ms(checkpointer_pool, SHARD)) == {SHARD}

    other = ShardId(19)
    await append(pool, 12, epoch=500, shard=other)
    await project_to(pool, 12, other)
    await commit_epoch_of(pool, other)

    assert await ages_ms(checkpointer_pool, SHARD) == {}
    await append(pool, 13)
    await project_to(pool, 13)
    assert set(await ages_ms(checkpointer_pool, SHARD)) == {SHARD}, "it moved since"


async def commit_epoch_of(pool: Pool, shard: ShardId) -> None:
    assert (await checkpoint.record(pool, {shard: EventId(0)}, limit=10)).executions


async def test_the_barrier_that_was_missed_goes_to_where_the_execution_lies_now(
    pool: Pool, checkpointer_pool: Pool, bus: Bus, ids: Iterator[int], heard: Heard
) -> None:
    """Nothing ever happened there: the count of shards has changed since."""
    progress = Progress()
    moved = 5
    lies_on = shard_of(ExecutionId(moved), shard_count=16)
    assert lies_on != SHARD
    await append(pool, 5, execution_id=moved)
    await close_epoch(checkpointer_pool, bus, progress, mint_above=lambda _floor: next(ids))
    await pool.execute("UPDATE noetl.event SET created_at = now() - interval '1 minute'")

    await watch_ages(checkpointer_pool, progress)
    await close_epoch(checkpointer_pool, bus, progress, mint_above=lambda _floor: next(ids))

    assert await heard.until(2) == [(1000, SHARD), (1001, lies_on)]
    assert (
        await close_epoch(checkpointer_pool, bus, progress, mint_above=lambda _floor: next(ids))
        is None
    ), "until the next look"


async def make_older(pool: Pool, event_id: int, seconds: float) -> None:
    await pool.execute(
        "UPDATE noetl.event SET created_at = now() - make_interval(secs => $1) WHERE event_id = $2",
        seconds,
        event_id,
    )


async def test_to_know_the_ages_of_quiet_shards_no_execution_is_read(
    pool: Pool, checkpointer_pool: Pool
) -> None:
    """Not those that wait for something, nor, a second time, those that ended after an epoch."""
    await pool.execute(
        "INSERT INTO noetl.execution (execution_id, catalog_id, path, version, shard_id, status,"
        " state, ctx, progress, last_event_type, last_projected_event_id, started_at, updated_at)"
        " SELECT i, 1, 'p', 1, $1, CASE WHEN i > 3000 THEN 'COMPLETED' ELSE 'RUNNING' END, '{}',"
        " '{}', '{}', 'step.enter', i, now(), now() FROM generate_series(1, 3010) AS i",
        SHARD,
    )
    await pool.execute(
        "INSERT INTO noetl.event (execution_id, event_id, event_key, shard_id, event_type)"
        " SELECT i, i, 'k', $1, 'step.enter' FROM generate_series(1, 3010) AS i",
        SHARD,
    )
    await pool.execute("INSERT INTO noetl.checkpoint VALUES (1, $1, 500, 3000, now())", SHARD)
    await project_to(pool, 3010)
    for table in ("execution", "event", "checkpoint"):
        await pool.execute(f"ANALYZE noetl.{table}")
    first = await scanned(pool, checkpoint._AGES, [SHARD], [0], 5000)
    assert sum(rows for name, rows in first.items() if name.startswith("execution")) == 10
    progress = Progress()
    await watch_ages(checkpointer_pool, progress)

    again = await scanned(pool, checkpoint._AGES, [SHARD], [progress.passed[SHARD]], 5000)

    assert progress.passed[SHARD] == 3010
    assert not any(rows for name, rows in again.items() if name.startswith(("execution", "event")))


async def test_the_first_event_that_goes_on_is_found_behind_many_of_what_has_ended(
    pool: Pool, checkpointer_pool: Pool
) -> None:
    await add_execution(pool, status="COMPLETED", execution_id=1)
    await add_execution(pool, status="RUNNING", execution_id=2)
    for event_id in range(1, 10):
        await append(pool, event_id)
    await append(pool, 10, execution_id=2)
    await project_to(pool, 10)
    places = {SHARD: EventId(0)}
    seen = []
    for _ in range(4):
        found = await checkpoint.ages(checkpointer_pool, places, limit=4)
        places = found.passed
        seen.append((bool(found.ages_ms), places[SHARD]))

    assert seen == [(False, 4), (False, 8), (True, 9), (True, 9)]


async def test_epochs_of_what_has_ended_are_forgotten_but_for_the_newest_of_a_shard(
    pool: Pool, checkpointer_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for execution_id in range(1, 8):
        status = "RUNNING" if execution_id in (2, 5) else "COMPLETED"
        await add_execution(pool, status=status, execution_id=execution_id)
        for epoch in (500, 501):
            event_id = (epoch - 500) * 10 + execution_id
            await append(pool, event_id, execution_id=execution_id, epoch=epoch)
    await append(pool, 90, execution_id=90, epoch=500, shard=ShardId(4))
    await project_to(pool, 90)
    await project_to(pool, 90, ShardId(4))
    progress = Progress()
    await commit_epoch(checkpointer_pool, progress, batch_size=100)
    monkeypatch.setattr(commit_epoch_module, "SWEPT_ROWS_MAX", 3)

    counts = [await forget_ended(checkpointer_pool, progress) for _ in range(12)]

    left = [(execution_id, epoch) for execution_id, epoch, _ in await recorded(pool)]
    assert left == [(2, 500), (2, 501), (5, 500), (5, 501), (7, 501), (90, 500)]
    assert sum(counts) == 9
    assert await checkpoint.resume(pool, [SHARD]) == {SHARD: 17}, "it would search again"


async def test_an_epoch_is_above_all_that_were_closed_whatever_the_clock_says(
    pool: Pool, checkpointer_pool: Pool, bus: Bus, heard: Heard
) -> None:
    """Brokers would take it for an old one: none would be closed until the clock has come there."""
    minted = Snowflake(7, lambda: EPOCH_MS + 1000)

    def mint_above(floor: int) -> int:
        minted.pass_over(floor)
        return minted.mint()

    async def close(progress: Progress) -> int:
        epoch = await close_epoch(checkpointer_pool, bus, progress, mint_above=mint_above)
        assert epoch is not None
        return epoch

    recorded_epoch, closed_epoch, silent_epoch = (
        n << 22 for n in (3_600_000, 3_700_000, 3_800_000)
    )
    await pool.execute(
        "INSERT INTO noetl.checkpoint VALUES (1, $1, $2, 1, now())", SHARD, recorded_epoch
    )
    await append(pool, 5)
    assert await close(Progress()) > recorded_epoch
    await append(pool, 6, epoch=closed_epoch)
    assert await close(Progress()) > closed_epoch
    progress = Progress()
    await close(progress)
    await append(pool, 7)
    await pool.execute("UPDATE noetl.event SET epoch_id = $1 WHERE event_id = 7", silent_epoch)
    assert await close(progress) > silent_epoch


async def test_the_newest_epochs_of_an_execution_are_those_of_its_newest_events(
    pool: Pool, checkpointer_pool: Pool
) -> None:
    progress = Progress()
    for event_id, epoch in ((1, 900), (2, 901), (3, 500), (4, 501)):
        await append(pool, event_id, epoch=epoch)
        await project_to(pool, event_id)
        await commit_epoch(checkpointer_pool, progress, batch_size=100)

    assert await recorded(pool) == [(1, 500, 3), (1, 501, 4)]
    assert await checkpoint.resume(pool, [SHARD]) == {SHARD: 4}


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


async def test_what_the_projection_tells_is_recorded_long_before_the_next_look(
    pool: Pool, database: str, nats_url: str, bus: Bus
) -> None:
    await append(pool, 12, epoch=500)
    config = CheckpointerConfig(
        postgres_dsn=database, nats_url=nats_url, checkpoint_record_interval_ms=3_600_000
    )
    async with serving(Service("checkpointer", config), start), asyncio.timeout(60):
        await asyncio.sleep(0.2)
        assert await recorded(pool) == []
        await project_to(pool, 12)

        await bus.wake(EPOCHS_PROJECTED)
        while not await recorded(pool):  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.02)


async def test_a_shard_that_missed_its_barrier_gets_another(
    pool: Pool, checkpointer_pool: Pool, bus: Bus, ids: Iterator[int], heard: Heard
) -> None:
    progress = Progress()
    here = next(e for e in map(ExecutionId, count(1)) if shard_of(e, shard_count=16) == SHARD)
    await append(pool, 5, execution_id=here)
    await add_execution(pool, status="RUNNING", execution_id=here)
    await close_epoch(checkpointer_pool, bus, progress, mint_above=lambda _floor: next(ids))
    assert (
        await close_epoch(checkpointer_pool, bus, progress, mint_above=lambda _floor: next(ids))
        is None
    )
    await pool.execute("UPDATE noetl.event SET created_at = now() - interval '1 minute'")

    await watch_ages(checkpointer_pool, progress)

    assert (
        await close_epoch(checkpointer_pool, bus, progress, mint_above=lambda _floor: next(ids))
        == 1001
    )
    assert await heard.until(2) == [(1000, SHARD), (1001, SHARD)]
