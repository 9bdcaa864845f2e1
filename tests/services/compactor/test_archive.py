"""The compactor takes old executions out of the database, and nothing is lost on the way."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import duckdb
import pytest

from noetl_compactor.archive import archive_past
from noetl_core.blob.history import History
from noetl_core.domain.ids import EventId, ExecutionId, RefId
from noetl_core.store.postgres import Pool, open_pool

from .old_log import (
    EVENTS,
    WEEK,
    DiedError,
    a_week,
    an_execution,
    dies_at,
    execution_id,
    goes_on,
    rows_of,
    rules,
    tables,
)

STEPS = (
    "surveyed",
    "file written",
    "file compared",
    "recorded",
    "published",
    "checked",
    "dropped",
)
EXECUTIONS = 5
DEFAULTS = {"event_default", "result_ref_default"}


@pytest.fixture
async def compactor_pool(database: str) -> AsyncIterator[Pool]:
    async with open_pool(database, role="noetl_compactor", size_max=3) as opened:
        yield opened


def in_files(root: Path, table: str) -> list[Any]:
    """What anybody reads who has the directory and DuckDB."""
    files = sorted(str(file) for file in root.glob(f"*/{table}-*.parquet"))
    if not files:
        return []
    key = {"event": "event_id", "result_ref": "ref_id"}[table]
    query = f"SELECT * FROM read_parquet($1) ORDER BY execution_id, {key}"
    return duckdb.connect().execute(query, [files]).fetchall()


def files_like(root: Path, pattern: str) -> list[Path]:
    return sorted(root.glob(pattern))


def ids(rows: list[Any]) -> list[tuple[int, int]]:
    return [(row[0], row[1]) for row in rows]


async def assert_archived_once(pool: Pool, root: Path, before: dict[str, list[Any]]) -> None:
    """Every row that was there is in the files, once, and in the database no more."""
    for table, rows in before.items():
        assert ids(in_files(root, table)) == ids(rows), table
        assert await rows_of(pool, table) == []
    assert await tables(pool) == DEFAULTS
    assert await pool.fetchval("SELECT count(*) FROM noetl.manifest WHERE kind = 'archive'") == 1
    assert not files_like(root, "*.making")


async def an_old_log(pool: Pool) -> dict[str, list[Any]]:
    await a_week(pool)
    for number in range(EXECUTIONS):
        await an_execution(pool, number)
    return {table: await rows_of(pool, table) for table in ("event", "result_ref")}


async def test_an_old_week_is_in_files_and_its_partitions_are_gone(
    pool: Pool, compactor_pool: Pool, tmp_path: Path
) -> None:
    before = await an_old_log(pool)

    archived = await archive_past(compactor_pool, rules(tmp_path))

    assert archived == EXECUTIONS * len(EVENTS)
    await assert_archived_once(pool, tmp_path, before)
    for row, stored in zip(before["event"], in_files(tmp_path, "event"), strict=True):
        assert stored[:-1] == row[:-1]
        assert stored[-1] == row[-1].replace(tzinfo=None)


async def test_many_files_hold_the_same_as_one(
    pool: Pool, compactor_pool: Pool, tmp_path: Path
) -> None:
    before = await an_old_log(pool)

    await archive_past(compactor_pool, rules(tmp_path, file_rows=3))

    await assert_archived_once(pool, tmp_path, before)
    assert len(files_like(tmp_path, "*/event-*.parquet")) == 7


async def test_an_old_partition_without_rows_is_dropped(
    pool: Pool, compactor_pool: Pool, tmp_path: Path
) -> None:
    await a_week(pool)

    assert await archive_past(compactor_pool, rules(tmp_path)) == 0

    assert await tables(pool) == DEFAULTS


async def test_a_young_week_stays(pool: Pool, compactor_pool: Pool, tmp_path: Path) -> None:
    before = await an_old_log(pool)

    too_early = rules(tmp_path)._replace(kept_from_ms=0)
    archived = await archive_past(compactor_pool, too_early)

    assert archived == 0
    assert await rows_of(pool, "event") == before["event"]


async def test_what_is_archived_is_answered_as_before(
    pool: Pool, compactor_pool: Pool, tmp_path: Path
) -> None:
    await an_old_log(pool)
    one = ExecutionId(execution_id(2))
    history = History(str(tmp_path))
    events = [dict(row) for row in await history.page(pool, one, after=EventId(0), limit=10)]
    results = await history.find(pool, one, [RefId(one + 3)])

    await archive_past(compactor_pool, rules(tmp_path))

    after = [dict(row) for row in await history.page(pool, one, after=EventId(0), limit=10)]
    assert after == events
    assert len(after) == len(EVENTS)
    assert await history.find(pool, one, [RefId(one + 3)]) == results
    assert await history.is_archived(pool, one)


@pytest.mark.parametrize("step", STEPS)
async def test_a_turn_that_dies_anywhere_loses_nothing(
    pool: Pool, compactor_pool: Pool, tmp_path: Path, step: str
) -> None:
    before = await an_old_log(pool)
    with pytest.raises(DiedError):
        await archive_past(compactor_pool, rules(tmp_path, after=dies_at(step)))

    await archive_past(compactor_pool, rules(tmp_path))

    await assert_archived_once(pool, tmp_path, before)


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from noetl_compactor.archive import archive_past
from noetl_core.store.postgres import open_pool
from services.compactor.old_log import rules

def after(line):
    if line == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with open_pool(sys.argv[1], role="noetl_compactor", size_max=2) as pool:
        await archive_past(pool, rules(Path(sys.argv[2]), after=after))

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
async def test_a_killed_compactor_loses_nothing(
    pool: Pool, compactor_pool: Pool, database: str, tmp_path: Path, step: str
) -> None:
    before = await an_old_log(pool)
    root = tmp_path / "archive"
    tests = str(Path(__file__).parents[2])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", KILLED, database, str(root), step, tests),
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert await process.wait() == -signal.SIGKILL

    await archive_past(compactor_pool, rules(root))

    await assert_archived_once(pool, root, before)


async def test_executions_that_run_stay_where_they_are_found(
    pool: Pool, compactor_pool: Pool, tmp_path: Path
) -> None:
    await an_old_log(pool)
    running = await an_execution(pool, 50, status="RUNNING")
    own = [row for row in await rows_of(pool, "event") if row[0] == running]

    await archive_past(compactor_pool, rules(tmp_path))

    assert await rows_of(pool, "event") == own
    assert len(await rows_of(pool, "result_ref")) == 1
    assert running not in {row[0] for row in in_files(tmp_path, "event")}
    assert await tables(pool) == DEFAULTS
    await goes_on(pool, running)
    assert len(await rows_of(pool, "event")) == len(own) + 1


async def test_one_that_ran_on_is_archived_when_it_has_ended(
    pool: Pool, compactor_pool: Pool, tmp_path: Path
) -> None:
    await an_old_log(pool)
    await an_execution(pool, 50, status="RUNNING")
    before = {table: await rows_of(pool, table) for table in ("event", "result_ref")}
    await archive_past(compactor_pool, rules(tmp_path))
    await pool.execute("UPDATE noetl.execution SET status = 'COMPLETED', ended_at = started_at")

    archived = await archive_past(compactor_pool, rules(tmp_path))

    assert archived == len(EVENTS)
    for table, rows in before.items():
        assert ids(in_files(tmp_path, table)) == ids(rows)
        assert await rows_of(pool, table) == []


async def test_one_that_ended_lately_stays(
    pool: Pool, compactor_pool: Pool, tmp_path: Path
) -> None:
    await an_old_log(pool)
    await pool.execute("UPDATE noetl.execution SET ended_at = now()")

    assert await archive_past(compactor_pool, rules(tmp_path)) == 0
    assert len(await rows_of(pool, "event")) == EXECUTIONS * len(EVENTS)


async def test_a_child_stays_while_an_ancestor_runs(
    pool: Pool, compactor_pool: Pool, tmp_path: Path
) -> None:
    await a_week(pool)
    grandparent = await an_execution(pool, 0, status="RUNNING")
    parent = await an_execution(pool, 1, parent=grandparent)
    child = await an_execution(pool, 2, parent=parent)
    await an_execution(pool, 3)

    await archive_past(compactor_pool, rules(tmp_path))

    assert {row[0] for row in await rows_of(pool, "event")} == {grandparent, parent, child}


async def test_a_retry_that_is_not_projected_yet_keeps_its_execution(
    pool: Pool, compactor_pool: Pool, tmp_path: Path
) -> None:
    await an_old_log(pool)
    await goes_on(pool, execution_id(2))

    await archive_past(compactor_pool, rules(tmp_path))

    assert {row[0] for row in await rows_of(pool, "event")} == {execution_id(2)}


@pytest.mark.parametrize("step", ["file compared", "recorded", "checked"])
async def test_a_retry_while_it_is_archived_is_noticed_and_nothing_is_dropped(
    pool: Pool, compactor_pool: Pool, tmp_path: Path, step: str
) -> None:
    await an_old_log(pool)
    with pytest.raises(DiedError):
        await archive_past(compactor_pool, rules(tmp_path, after=dies_at(step)))
    await goes_on(pool, execution_id(2))

    await archive_past(compactor_pool, rules(tmp_path))

    assert {row[0] for row in await rows_of(pool, "event")} == {execution_id(2)}
    assert len(in_files(tmp_path, "event")) == (EXECUTIONS - 1) * len(EVENTS)


async def test_the_tails_show_what_was_appended_during_the_copy(
    pool: Pool, compactor_pool: Pool, tmp_path: Path
) -> None:
    await an_old_log(pool)
    with pytest.raises(DiedError):
        await archive_past(compactor_pool, rules(tmp_path, after=dies_at("recorded")))
    await goes_on(pool, execution_id(2))
    # As many rows as were archived, but not the same ones: only the tails tell.
    await pool.execute(
        "DELETE FROM noetl.event WHERE execution_id = $1 AND event_key = 'k1'", execution_id(3)
    )
    archive_id = await pool.fetchval("SELECT manifest_id FROM noetl.manifest")

    assert await compactor_pool.fetchval("SELECT noetl.drop_archived($1)", archive_id) == "changed"


async def test_a_damaged_file_drops_nothing_and_is_written_again(
    pool: Pool, compactor_pool: Pool, tmp_path: Path
) -> None:
    before = await an_old_log(pool)
    with pytest.raises(DiedError):
        await archive_past(compactor_pool, rules(tmp_path, after=dies_at("published")))
    (file,) = files_like(tmp_path, "*/event-0000.parquet")
    file.write_bytes(file.read_bytes()[:-1])

    await archive_past(compactor_pool, rules(tmp_path))

    await assert_archived_once(pool, tmp_path, before)


async def test_rows_without_a_partition_of_their_week_are_deleted_in_slices(
    pool: Pool, compactor_pool: Pool, tmp_path: Path
) -> None:
    for number in range(EXECUTIONS):
        await an_execution(pool, number)
    running = await an_execution(pool, 2000, status="RUNNING")
    events = await rows_of(pool, "event")

    archived = await archive_past(compactor_pool, rules(tmp_path, slice_rows=6))

    assert archived == EXECUTIONS * len(EVENTS)
    assert {row[0] for row in await rows_of(pool, "event")} == {running}
    assert ids(in_files(tmp_path, "event")) == ids(events[:archived])


async def test_a_week_with_many_running_keeps_its_partition(
    pool: Pool, compactor_pool: Pool, tmp_path: Path
) -> None:
    await an_old_log(pool)
    running = await an_execution(pool, 50, status="RUNNING")

    await archive_past(compactor_pool, rules(tmp_path, moved_rows=1))

    assert {row[0] for row in await rows_of(pool, "event")} == {running}
    assert f"event_{WEEK}" in await tables(pool)


async def test_nothing_is_dropped_without_an_archive(
    pool: Pool, compactor_pool: Pool, tmp_path: Path
) -> None:
    await an_old_log(pool)

    with pytest.raises(asyncpg.PostgresError, match="no verified archive"):
        await compactor_pool.fetchval("SELECT noetl.drop_archived(12)")
    for statement in ("DELETE FROM noetl.event", f"DROP TABLE noetl.event_{WEEK}"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await compactor_pool.execute(statement)


async def test_nothing_is_dropped_for_an_archive_with_fewer_rows(
    pool: Pool, compactor_pool: Pool, tmp_path: Path
) -> None:
    before = await an_old_log(pool)
    with pytest.raises(DiedError):
        await archive_past(compactor_pool, rules(tmp_path, after=dies_at("recorded")))
    archive_id = await pool.fetchval("SELECT manifest_id FROM noetl.manifest")
    drop = "SELECT noetl.drop_archived($1)"

    await pool.execute("UPDATE noetl.manifest SET item_count = item_count - 1")
    with pytest.raises(asyncpg.PostgresError, match="not complete"):
        await compactor_pool.fetchval(drop, archive_id)
    await pool.execute(
        "UPDATE noetl.manifest_part SET item_count = item_count - 1 WHERE source = 'event'"
    )
    assert await compactor_pool.fetchval(drop, archive_id) == "changed"

    assert await rows_of(pool, "event") == before["event"]


async def test_a_reader_that_is_in_the_way_only_delays_the_drop(
    pool: Pool, compactor_pool: Pool, tmp_path: Path
) -> None:
    before = await an_old_log(pool)
    async with pool.acquire() as reader, reader.transaction():
        await reader.fetch("SELECT 1 FROM noetl.event LIMIT 1")
        assert await archive_past(compactor_pool, rules(tmp_path)) == 0
    assert await rows_of(pool, "event") == before["event"]

    assert await archive_past(compactor_pool, rules(tmp_path)) == EXECUTIONS * len(EVENTS)

    await assert_archived_once(pool, tmp_path, before)


async def test_two_compactors_at_once_archive_everything_once(
    pool: Pool, compactor_pool: Pool, tmp_path: Path
) -> None:
    before = await an_old_log(pool)

    await asyncio.gather(*(archive_past(compactor_pool, rules(tmp_path)) for _ in range(2)))

    await assert_archived_once(pool, tmp_path, before)
