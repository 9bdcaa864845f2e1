"""While old executions leave the database, others append to the log and hardly notice."""

import asyncio
import errno
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import pytest

from noetl_compactor.archive import Resting, archive_past
from noetl_core.blob.file_place import FilePlace
from noetl_core.blob.place import Place
from noetl_core.domain.ids import EventId, ExecutionId
from noetl_core.domain.partitions import partition_of, partitions_ahead
from noetl_core.domain.snowflake import first_id_at
from noetl_core.store import archive, batch, partition
from noetl_core.store.batch import Batch, ExpiryRow
from noetl_core.store.postgres import Pool, open_pool

from .old_log import (
    NOW_MS,
    OLD_WEEK_MS,
    WEEK,
    DiedError,
    a_large_week,
    a_week,
    an_execution,
    dies_at,
    execution_id,
    goes_on,
    rows_of,
    rules,
    tables,
)

LONGEST_APPEND_SECONDS = 0.5


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """What is measured here happens in the database, wherever the files go."""
    return FilePlace(tmp_path / "archive")


@pytest.fixture
async def compactor_pool(database: str) -> AsyncIterator[Pool]:
    async with open_pool(database, role="noetl_compactor", size_max=3) as opened:
        yield opened


APPENDS = """
import asyncio, signal, sys, time
import asyncpg

async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    conn = await asyncpg.connect(sys.argv[1])
    execution, count, longest = int(sys.argv[2]), 0, 0.0
    while not stop.is_set():
        count += 1
        begun = time.perf_counter()
        await conn.execute(
            "INSERT INTO noetl.event (execution_id, event_id, event_key, shard_id, event_type)"
            " VALUES ($1, $2, $3, 0, 'step.enter')",
            execution, execution + count, f"k{count}",
        )
        longest = max(longest, time.perf_counter() - begun)
        if count == 1:
            print("begun", flush=True)
        await asyncio.sleep(0.005)
    print(count, longest, flush=True)

asyncio.run(main())
"""


class Appends:
    count = 0
    longest = 0.0


@asynccontextmanager
async def appending(dsn: str) -> AsyncIterator[Appends]:
    """Another process appends to an execution of this week, one event after the other."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", APPENDS, dsn, str(first_id_at(NOW_MS))),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"begun\n"
    appends = Appends()
    try:
        yield appends
    finally:
        process.send_signal(signal.SIGTERM)
        count, longest = (await process.stdout.readline()).split()
        await process.wait()
        appends.count, appends.longest = int(count), float(longest)


@pytest.mark.slow
@pytest.mark.measured
async def test_no_append_waits_long_while_a_large_week_is_dropped(
    pool: Pool, compactor_pool: Pool, database: str, place: Place
) -> None:
    await a_week(pool)
    for one in partitions_ahead(now_ms=NOW_MS, weeks=1):
        await partition.ensure(pool, one)
    await a_large_week(pool, executions=2000, events=100)

    async with appending(database) as appends:
        archived = await archive_all(compactor_pool, place)

    assert archived == 200_000
    assert f"event_{WEEK}" not in await tables(pool)
    assert appends.count > 10
    assert appends.longest < LONGEST_APPEND_SECONDS


async def archive_all(pool: Pool, place: Place) -> int:
    """In more than one turn, if an append that had to wait for the processor was in the way."""
    archived = 0
    async with asyncio.timeout(200):
        while await pool.fetchval(
            "SELECT EXISTS (SELECT FROM noetl.event WHERE execution_id < $1)", first_id_at(NOW_MS)
        ):
            archived += await archive_past(pool, rules(place))
    return archived


@pytest.mark.slow
@pytest.mark.measured
async def test_no_append_waits_long_while_a_large_execution_is_deleted_beside_it(
    pool: Pool, compactor_pool: Pool, database: str, place: Place
) -> None:
    await a_large_week(pool, executions=1, events=600_000)

    async with appending(database) as appends:
        archived = await archive_all(compactor_pool, place)

    assert archived == 600_000
    assert appends.count > 10
    assert appends.longest < LONGEST_APPEND_SECONDS


async def test_a_drop_reads_no_row_twice_to_see_what_was_appended(
    pool: Pool, compactor_pool: Pool, database: str, place: Place
) -> None:
    await a_week(pool)
    await a_large_week(pool, executions=160, events=100)
    with pytest.raises(DiedError):
        await archive_past(compactor_pool, rules(place, after=dies_at("recorded")))
    # In the shard that is looked at last, so that the answer takes a look at all others.
    newest = await pool.fetchval("SELECT max(execution_id) FROM noetl.event WHERE shard_id = 15")
    await pool.execute(
        "INSERT INTO noetl.event (execution_id, event_id, event_key, shard_id, event_type)"
        " SELECT execution_id, max(event_id) + 1, 'new', 15, 'execution.retried' FROM noetl.event"
        " WHERE execution_id = $1 GROUP BY execution_id",
        newest,
    )
    archive_id = await pool.fetchval("SELECT manifest_id FROM noetl.manifest")

    # A session of its own: what others of the pool have read would be counted too.
    async with (
        open_pool(database, role="", size_max=1) as own,
        own.acquire() as conn,
        conn.transaction(),
    ):
        outcome = await archive.drop(conn, archive_id)
        read = await conn.fetchval(
            "SELECT seq_tup_read FROM pg_stat_xact_user_tables WHERE relname = $1", f"event_{WEEK}"
        )

    assert outcome == "changed"
    assert read <= 160 * 100 + 1  # they are counted once, before anything is locked


@asynccontextmanager
async def deleting(
    pool: Pool, compactor_pool: Pool, place: Place
) -> AsyncIterator[asyncio.Task[str]]:
    """The drop of two old executions in the DEFAULT partition, while it deletes: it has come to a
    result that somebody holds until this is over, and does not give up before."""
    for number in (1, 2):
        await an_execution(pool, number)
    with pytest.raises(DiedError):
        await archive_past(compactor_pool, rules(place, after=dies_at("recorded")))
    archive_id = await pool.fetchval("SELECT manifest_id FROM noetl.manifest")
    await pool.execute("ALTER FUNCTION noetl.drop_archived SET lock_timeout = '20s'")
    async with pool.acquire() as holder, compactor_pool.acquire() as conn:
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute("SELECT FROM noetl.result_ref FOR UPDATE")
        task = asyncio.create_task(archive.drop(conn, archive_id))
        while not await pool.fetchval("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)"):
            assert not task.done(), task
            await asyncio.sleep(0.005)
        yield task
        await transaction.rollback()
        await task


async def is_retried(pool: Pool) -> None:
    """As the broker commits it."""
    async with pool.acquire() as broker, broker.transaction():
        await goes_on(broker, execution_id(1))
        await broker.execute("SELECT noetl.require_start($1)", [execution_id(1)])


async def test_appends_do_not_wait_while_rows_are_deleted(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    async with deleting(pool, compactor_pool, place) as drop, pool.acquire() as broker:
        await broker.execute("SET lock_timeout = '5s'")
        await broker.execute(
            "INSERT INTO noetl.event (execution_id, event_id, event_key, shard_id, event_type)"
            " VALUES ($1, $2, 'start', 0, 'execution.started')",
            *(first_id_at(NOW_MS), first_id_at(NOW_MS) + 1),
        )

    assert drop.result() == "dropped"
    assert [row[0] for row in await rows_of(pool, "event")] == [first_id_at(NOW_MS)]


async def test_an_execution_that_goes_on_while_its_rows_are_deleted_keeps_them(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    async with deleting(pool, compactor_pool, place) as drop:
        await is_retried(pool)

    assert drop.result() == "changed"
    assert len(await rows_of(pool, "event")) == 2 * 4 + 1
    assert len(await rows_of(pool, "result_ref")) == 2


async def test_an_execution_does_not_go_on_once_its_rows_are_looked_at_under_the_lock(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    await an_execution(pool, 1)
    with pytest.raises(DiedError):
        await archive_past(compactor_pool, rules(place, after=dies_at("recorded")))
    archive_id = await pool.fetchval("SELECT manifest_id FROM noetl.manifest")

    async with compactor_pool.acquire() as conn, conn.transaction():
        assert await archive.drop(conn, archive_id) == "dropped"
        retried = asyncio.create_task(is_retried(pool))
        while not await pool.fetchval("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)"):
            assert not retried.done(), retried
            await asyncio.sleep(0.005)

    with pytest.raises(asyncpg.PostgresError) as refused:
        await retried
    assert refused.value.sqlstate == batch.ARCHIVED
    assert await rows_of(pool, "event") == []


async def test_a_week_keeps_its_partition_when_what_stays_is_heavy(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    await a_week(pool)
    await an_execution(pool, 1)
    running = await an_execution(pool, 2, status="RUNNING")
    await pool.execute(
        "UPDATE noetl.result_ref SET inline ="
        " (SELECT string_agg(sha512(n::text::bytea), '') FROM generate_series(1, 500) AS n)"
        " WHERE execution_id = $1",
        running,
    )

    await archive_past(compactor_pool, rules(place, moved_bytes=10_000))

    assert {row[0] for row in await rows_of(pool, "event")} == {running}
    assert f"result_ref_{WEEK}" in await tables(pool)


async def test_results_that_stay_count_as_rows_that_move(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    await a_week(pool)
    await an_execution(pool, 1)
    await an_execution(pool, 2, status="RUNNING")

    # Its four events might move; with its result it is too much.
    await archive_past(compactor_pool, rules(place, moved_rows=4))

    assert {f"event_{WEEK}", f"result_ref_{WEEK}"} <= await tables(pool)


@pytest.mark.parametrize("table", ["event", "result_ref"])
async def test_a_week_that_is_half_in_the_default_partition_is_deleted_in_slices(
    pool: Pool, compactor_pool: Pool, place: Place, table: str
) -> None:
    await partition.ensure(pool, partition_of(table, start_ms=OLD_WEEK_MS))
    for number in range(6):
        await an_execution(pool, number)

    await archive_past(compactor_pool, rules(place, moved_rows=5, slice_rows=6))

    cuts = await pool.fetch("SELECT meta ->> 'drops' AS drops FROM noetl.manifest")
    assert len(cuts) > 1
    assert {row["drops"] for row in cuts} == {"false"}
    assert await rows_of(pool, "event") == await rows_of(pool, "result_ref") == []
    # Nothing of it is in the way any more: the next turn drops the partition.
    await archive_past(compactor_pool, rules(place, moved_rows=5, slice_rows=6))
    assert f"{table}_{WEEK}" not in await tables(pool)


async def test_a_week_that_changed_is_tried_again_and_not_deleted_row_by_row(
    pool: Pool, compactor_pool: Pool, database: str, place: Place
) -> None:
    await a_week(pool)
    for number in range(4):
        await an_execution(pool, number)
    waiting = asyncio.Event()
    resume = asyncio.Event()

    async def retry() -> None:
        await waiting.wait()
        await goes_on(pool, execution_id(2))
        resume.set()

    retrying = asyncio.create_task(retry())
    original = archive.drop

    async def drop_after_the_retry(conn: object, archive_id: int) -> str:
        waiting.set()
        await resume.wait()
        return await original(conn, archive_id)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(archive, "drop", drop_after_the_retry)
        archived = await archive_past(compactor_pool, rules(place))
    await retrying

    assert archived == 0
    assert len(await rows_of(pool, "event")) == 4 * 4 + 1
    assert await archive_past(compactor_pool, rules(place)) == 3 * 4
    assert f"event_{WEEK}" not in await tables(pool)


async def test_an_execution_with_a_living_result_stays_until_that_is_removed(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    await a_week(pool)
    await an_execution(pool, 1)
    living = await an_execution(pool, 2)
    until = datetime.now(UTC) + timedelta(hours=1)
    await pool.execute(
        "UPDATE noetl.result_ref SET expires_at = $2 WHERE execution_id = $1", living, until
    )

    await archive_past(compactor_pool, rules(place))
    stayed = {row[0] for row in await rows_of(pool, "event")}
    await pool.execute("UPDATE noetl.result_ref SET removed_at = now(), inline = ''")
    archived = await archive_past(compactor_pool, rules(place))

    assert stayed == {living}
    assert archived == 4


async def test_a_result_with_a_ttl_is_committed_while_rows_of_another_week_are_deleted(
    pool: Pool,
) -> None:
    for one in partitions_ahead(now_ms=NOW_MS, weeks=1):
        await partition.ensure(pool, one)
    execution = ExecutionId(first_id_at(NOW_MS))
    await pool.execute(
        "INSERT INTO noetl.result_ref (execution_id, ref_id, step, store_tier, bytes, inline)"
        " VALUES ($1, 7, 'load', 'db', 2, '{}')",
        execution,
    )
    ending = Batch()
    ending.expiries.append(ExpiryRow(execution, EventId(7), 60.0))
    async with pool.acquire() as compactor, compactor.transaction():
        await compactor.execute(
            "LOCK TABLE noetl.event_default, noetl.result_ref_default IN SHARE ROW EXCLUSIVE MODE"
        )
        async with pool.acquire() as broker:
            await broker.execute("SET lock_timeout = '5s'")
            await batch.commit(broker, ending)

    expires_at = await pool.fetchval("SELECT expires_at FROM noetl.result_ref")
    assert timedelta(seconds=50) < expires_at - datetime.now(UTC) < timedelta(seconds=70)


def full(step: str) -> None:
    """The disk, as soon as there is a file."""
    if step == "file put":
        raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_full_disk_fails_one_archive_and_the_next_turn_makes_it(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    await a_week(pool)
    await an_execution(pool, 1)
    resting = Resting()

    assert await archive_past(compactor_pool, rules(place, after=full, resting=resting)) == 0
    assert await place.names() == []
    assert len(await rows_of(pool, "event")) == 4

    assert await archive_past(compactor_pool, rules(place, resting=resting)) == 4
    assert await place.names("making/") == []


async def test_a_week_that_fails_twice_in_a_row_is_left_alone_for_a_while(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    await a_week(pool)
    await an_execution(pool, 1)
    resting = Resting()
    for _ in range(2):
        await archive_past(compactor_pool, rules(place, after=full, resting=resting))

    assert await archive_past(compactor_pool, rules(place, resting=resting)) == 0
    assert len(await rows_of(pool, "event")) == 4
    assert await archive_past(compactor_pool, rules(place, resting=Resting(0.0))) == 4


async def test_slices_of_a_week_that_fails_twice_are_not_all_tried(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    for number in range(6):
        await an_execution(pool, number)
    tries = 0

    def always_full(step: str) -> None:
        nonlocal tries
        tries += step == "begun"
        full(step)

    more = {"after": always_full, "slice_rows": 4, "resting": Resting()}
    assert await archive_past(compactor_pool, rules(place, **more)) == 0

    assert tries == 2
    assert await place.names() == []


async def test_a_week_of_which_nothing_can_go_is_left_alone_for_a_while(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    await an_execution(pool, 1, status="RUNNING")
    resting = Resting()
    await archive_past(compactor_pool, rules(place, resting=resting))
    await pool.execute("UPDATE noetl.execution SET status = 'COMPLETED', ended_at = started_at")

    assert await archive_past(compactor_pool, rules(place, resting=resting)) == 0
    assert await archive_past(compactor_pool, rules(place, resting=Resting(0.0))) == 4
