"""The compactor takes old executions out of the database, and nothing is lost on the way."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import get_args

import asyncpg
import pytest

from noetl_compactor.archive import Step, archive_past
from noetl_core.blob.archives import MAKING, finished, mark_of
from noetl_core.blob.file_place import FilePlace
from noetl_core.blob.history import ArchiveUnavailableError, History
from noetl_core.blob.place import Place
from noetl_core.domain.ids import EventId, ExecutionId, RefId
from noetl_core.store.postgres import Pool, open_pool

from .archived import DEFAULTS, assert_archived_once, ids, in_files, names_like
from .old_log import (
    EVENTS,
    EXECUTIONS,
    WEEK,
    DiedError,
    a_week,
    an_execution,
    an_old_log,
    dies_at,
    execution_id,
    goes_on,
    rows_of,
    rules,
    tables,
)

STEPS: tuple[Step, ...] = get_args(Step)


async def test_an_old_week_is_in_files_and_its_partitions_are_gone(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    before = await an_old_log(pool)

    archived = await archive_past(compactor_pool, rules(place))

    assert archived == EXECUTIONS * len(EVENTS)
    await assert_archived_once(pool, place, before)
    for row, stored in zip(before["event"], await in_files(place, "event"), strict=True):
        assert stored[:-1] == row[:-1]
        assert stored[-1] == row[-1].replace(tzinfo=None)


async def test_how_the_database_spells_dates_does_not_matter(
    pool: Pool, database: str, place: Place
) -> None:
    before = await an_old_log(pool)
    name = await pool.fetchval("SELECT current_database()")
    for setting in ("datestyle = 'German, DMY'", "timezone = 'Asia/Kolkata'"):
        await pool.execute(f'ALTER DATABASE "{name}" SET {setting}')

    async with open_pool(database, role="noetl_compactor", size_max=2) as compactor_pool:
        await archive_past(compactor_pool, rules(place))

    await assert_archived_once(pool, place, before)


async def test_texts_come_back_with_the_line_ends_they_had(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    await an_old_log(pool)
    await pool.execute("UPDATE noetl.event SET node_name = E'a\\r\\nb\\rc\\n', status = E'\\r'")
    await pool.execute("UPDATE noetl.result_ref SET media_type = E'\\r\\n', preview = E'\\r'")
    before = {table: await rows_of(pool, table) for table in ("event", "result_ref")}

    await archive_past(compactor_pool, rules(place))

    await assert_archived_once(pool, place, before)
    for row, stored in zip(before["event"], await in_files(place, "event"), strict=True):
        assert stored[:-1] == row[:-1]


async def test_many_files_hold_the_same_as_one(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    before = await an_old_log(pool)

    await archive_past(compactor_pool, rules(place, file_rows=3))

    await assert_archived_once(pool, place, before)
    assert len(await names_like(place, "*/event-*.parquet")) == 7


async def test_an_old_partition_without_rows_is_dropped(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    await a_week(pool)

    assert await archive_past(compactor_pool, rules(place)) == 0

    assert await tables(pool) == DEFAULTS


async def test_a_young_week_stays(pool: Pool, compactor_pool: Pool, place: Place) -> None:
    before = await an_old_log(pool)

    too_early = rules(place)._replace(kept_from_ms=0)
    archived = await archive_past(compactor_pool, too_early)

    assert archived == 0
    assert await rows_of(pool, "event") == before["event"]


async def test_what_is_archived_is_answered_as_before(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    await an_old_log(pool)
    one = ExecutionId(execution_id(2))
    history = History(place)
    events = [dict(row) for row in await history.page(pool, one, after=EventId(0), limit=10)]
    results = await history.find(pool, one, [RefId(one + 3)])

    await archive_past(compactor_pool, rules(place))

    after = [dict(row) for row in await history.page(pool, one, after=EventId(0), limit=10)]
    assert after == events
    assert len(after) == len(EVENTS)
    assert await history.find(pool, one, [RefId(one + 3)]) == results
    assert await history.is_archived(pool, one)


async def test_nobody_needs_the_files_of_an_archive_before_its_rows_are_dropped(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    await an_old_log(pool)
    with pytest.raises(DiedError):
        await archive_past(compactor_pool, rules(place, after=dies_at("recorded")))
    one = ExecutionId(execution_id(2))
    blind = History(None)

    assert await blind.page(pool, one, after=EventId(one + 4), limit=10) == []
    assert await blind.find(pool, one, [RefId(12)]) == {}
    assert await blind.is_archived(pool, one)
    await archive_past(compactor_pool, rules(place))
    with pytest.raises(ArchiveUnavailableError):
        await blind.page(pool, one, after=EventId(one + 4), limit=10)


@pytest.mark.parametrize("step", STEPS)
async def test_a_turn_that_dies_anywhere_loses_nothing(
    pool: Pool, compactor_pool: Pool, place: Place, step: str
) -> None:
    before = await an_old_log(pool)
    with pytest.raises(DiedError):
        await archive_past(compactor_pool, rules(place, after=dies_at(step)))

    await archive_past(compactor_pool, rules(place))

    await assert_archived_once(pool, place, before)


_LOCKS = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"


async def until_unlocked(pool: Pool) -> None:
    """Postgres needs a moment to see that whoever held the lock of a turn is no more."""
    async with asyncio.timeout(60):
        while await pool.fetchval(_LOCKS):  # noqa: ASYNC110 - Postgres acts
            await asyncio.sleep(0.01)


KILLED = """
import asyncio, os, signal, sys
sys.path.insert(0, sys.argv[3])
from noetl_compactor.archive import archive_past
from noetl_core.process.config import StoreConfig, load_config
from noetl_core.process.stores import open_archives
from noetl_core.store.postgres import open_pool
from services.compactor.old_log import rules

def after(line):
    if line == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with (
        open_pool(sys.argv[1], role="noetl_compactor", size_max=2) as pool,
        open_archives(load_config(StoreConfig, os.environ)) as place,
    ):
        await archive_past(pool, rules(place, after=after))

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
async def test_a_killed_compactor_loses_nothing(
    pool: Pool,
    compactor_pool: Pool,
    database: str,
    place: Place,
    place_environment: dict[str, str],
    tmp_path: Path,
    step: str,
) -> None:
    before = await an_old_log(pool)
    tests = str(Path(__file__).parents[2])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", KILLED, database, step, tests),
        env={**os.environ, **place_environment, "TMPDIR": str(tmp_path)},
    )
    assert await process.wait() == -signal.SIGKILL
    await until_unlocked(pool)

    await archive_past(compactor_pool, rules(place))

    await assert_archived_once(pool, place, before)


async def test_executions_that_run_stay_where_they_are_found(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    await an_old_log(pool)
    running = await an_execution(pool, 50, status="RUNNING")
    own = [row for row in await rows_of(pool, "event") if row[0] == running]

    await archive_past(compactor_pool, rules(place))

    assert await rows_of(pool, "event") == own
    assert len(await rows_of(pool, "result_ref")) == 1
    assert running not in {row[0] for row in await in_files(place, "event")}
    assert await tables(pool) == DEFAULTS
    await goes_on(pool, running)
    assert len(await rows_of(pool, "event")) == len(own) + 1


async def test_one_that_ran_on_is_archived_when_it_has_ended(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    await an_old_log(pool)
    await an_execution(pool, 50, status="RUNNING")
    before = {table: await rows_of(pool, table) for table in ("event", "result_ref")}
    await archive_past(compactor_pool, rules(place))
    await pool.execute("UPDATE noetl.execution SET status = 'COMPLETED', ended_at = started_at")

    archived = await archive_past(compactor_pool, rules(place))

    assert archived == len(EVENTS)
    for table, rows in before.items():
        assert ids(await in_files(place, table)) == ids(rows)
        assert await rows_of(pool, table) == []


async def test_one_that_ended_lately_stays(pool: Pool, compactor_pool: Pool, place: Place) -> None:
    await an_old_log(pool)
    await pool.execute("UPDATE noetl.execution SET ended_at = now()")

    assert await archive_past(compactor_pool, rules(place)) == 0
    assert len(await rows_of(pool, "event")) == EXECUTIONS * len(EVENTS)


async def test_a_child_stays_while_an_ancestor_runs(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    await a_week(pool)
    grandparent = await an_execution(pool, 0, status="RUNNING")
    parent = await an_execution(pool, 1, parent=grandparent)
    child = await an_execution(pool, 2, parent=parent)
    await an_execution(pool, 3)

    await archive_past(compactor_pool, rules(place))

    assert {row[0] for row in await rows_of(pool, "event")} == {grandparent, parent, child}


async def test_a_retry_that_is_not_projected_yet_keeps_its_execution(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    await an_old_log(pool)
    await goes_on(pool, execution_id(2))

    await archive_past(compactor_pool, rules(place))

    assert {row[0] for row in await rows_of(pool, "event")} == {execution_id(2)}


@pytest.mark.parametrize("step", ["file compared", "recorded", "checked"])
async def test_a_retry_while_it_is_archived_is_noticed_and_nothing_is_dropped(
    pool: Pool, compactor_pool: Pool, place: Place, step: str
) -> None:
    await an_old_log(pool)
    with pytest.raises(DiedError):
        await archive_past(compactor_pool, rules(place, after=dies_at(step)))
    await goes_on(pool, execution_id(2))

    await archive_past(compactor_pool, rules(place))

    assert {row[0] for row in await rows_of(pool, "event")} == {execution_id(2)}
    assert len(await in_files(place, "event")) == (EXECUTIONS - 1) * len(EVENTS)


async def test_the_tails_show_what_was_appended_during_the_copy(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    await an_old_log(pool)
    with pytest.raises(DiedError):
        await archive_past(compactor_pool, rules(place, after=dies_at("recorded")))
    await goes_on(pool, execution_id(2))
    # As many rows as were archived, but not the same ones: only the tails tell.
    await pool.execute(
        "DELETE FROM noetl.event WHERE execution_id = $1 AND event_key = 'k1'", execution_id(3)
    )
    archive_id = await pool.fetchval("SELECT manifest_id FROM noetl.manifest")

    assert await compactor_pool.fetchval("SELECT noetl.drop_archived($1)", archive_id) == "changed"


async def test_a_damaged_file_drops_nothing_and_is_written_again(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    before = await an_old_log(pool)
    with pytest.raises(DiedError):
        await archive_past(compactor_pool, rules(place, after=dies_at("published")))
    (file,) = await names_like(place, "*/event-0000.parquet")
    await place.write(file, (await place.read(file))[:-1])

    await archive_past(compactor_pool, rules(place))

    await assert_archived_once(pool, place, before)


async def test_rows_without_a_partition_of_their_week_are_deleted_in_slices(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    for number in range(EXECUTIONS):
        await an_execution(pool, number)
    running = await an_execution(pool, 2000, status="RUNNING")
    events = await rows_of(pool, "event")

    archived = await archive_past(compactor_pool, rules(place, slice_rows=6))

    assert archived == EXECUTIONS * len(EVENTS)
    assert {row[0] for row in await rows_of(pool, "event")} == {running}
    assert ids(await in_files(place, "event")) == ids(events[:archived])


async def test_a_week_with_many_running_keeps_its_partition(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    await an_old_log(pool)
    running = await an_execution(pool, 50, status="RUNNING")

    await archive_past(compactor_pool, rules(place, moved_rows=1))

    assert {row[0] for row in await rows_of(pool, "event")} == {running}
    assert f"event_{WEEK}" in await tables(pool)


async def test_nothing_is_dropped_without_an_archive(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    await an_old_log(pool)

    with pytest.raises(asyncpg.PostgresError, match="no verified archive"):
        await compactor_pool.fetchval("SELECT noetl.drop_archived(12)")
    for statement in ("DELETE FROM noetl.event", f"DROP TABLE noetl.event_{WEEK}"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await compactor_pool.execute(statement)


async def test_nothing_is_dropped_for_an_archive_with_fewer_rows(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    before = await an_old_log(pool)
    with pytest.raises(DiedError):
        await archive_past(compactor_pool, rules(place, after=dies_at("recorded")))
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
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    before = await an_old_log(pool)
    async with pool.acquire() as reader, reader.transaction():
        await reader.fetch("SELECT 1 FROM noetl.event LIMIT 1")
        assert await archive_past(compactor_pool, rules(place)) == 0
    assert await rows_of(pool, "event") == before["event"]

    assert await archive_past(compactor_pool, rules(place)) == EXECUTIONS * len(EVENTS)

    await assert_archived_once(pool, place, before)


async def test_two_compactors_at_once_archive_everything_once(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    before = await an_old_log(pool)

    await asyncio.gather(*(archive_past(compactor_pool, rules(place)) for _ in range(2)))

    await assert_archived_once(pool, place, before)


class SleepyPlace(FilePlace):
    """Whoever lists the marks here sleeps on it: long enough to lose the lock to a successor."""

    def __init__(self, root: Path, meanwhile: Callable[[], Awaitable[None]]) -> None:
        super().__init__(root)
        self._meanwhile = meanwhile

    async def names(self, prefix: str = "") -> list[str]:
        if prefix == MAKING:
            await self._meanwhile()
        return await super().names(prefix)


async def test_one_that_has_lost_the_lock_in_its_sleep_removes_nothing_of_its_successor(
    pool: Pool, compactor_pool: Pool, tmp_path: Path
) -> None:
    before = await an_old_log(pool)
    place = FilePlace(tmp_path)

    async def successor() -> None:
        await pool.fetch(
            "SELECT pg_terminate_backend(pid) FROM pg_locks"
            " WHERE locktype = 'advisory' AND pid <> pg_backend_pid()"
        )
        await until_unlocked(pool)
        with pytest.raises(DiedError):
            await archive_past(compactor_pool, rules(place, after=dies_at("recorded")))
        await until_unlocked(pool)

    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
        await archive_past(compactor_pool, rules(SleepyPlace(tmp_path, successor)))
    name = await pool.fetchval("SELECT meta ->> 'name' FROM noetl.manifest")

    assert len(await place.names(f"{name}/")) == 3
    await archive_past(compactor_pool, rules(place))
    await assert_archived_once(pool, place, before)


async def test_a_mark_that_came_too_late_hides_no_archive(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    before = await an_old_log(pool)
    await archive_past(compactor_pool, rules(place))
    await place.write(
        mark_of(await pool.fetchval("SELECT meta ->> 'name' FROM noetl.manifest")), b""
    )
    assert await finished(place) == []

    await archive_past(compactor_pool, rules(place))

    await assert_archived_once(pool, place, before)
    assert len(await finished(place)) == 1


async def test_files_of_a_manifest_that_was_lost_are_left_alone(
    pool: Pool, compactor_pool: Pool, place: Place
) -> None:
    """As after the database was restored from an older backup."""
    await an_old_log(pool)
    await archive_past(compactor_pool, rules(place))
    names = await place.names()
    await pool.execute("TRUNCATE noetl.manifest, noetl.manifest_part")

    await archive_past(compactor_pool, rules(place))

    assert await place.names() == names
