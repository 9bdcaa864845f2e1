"""A compactor that was paused comes back: another one has done its work, and it spoils nothing."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import duckdb
import pytest

from noetl_compactor.archive import archive_past
from noetl_core.blob.file_place import FilePlace
from noetl_core.store.postgres import Pool, open_pool

from .old_log import EVENTS, a_week, an_execution, rows_of, rules

pytestmark = pytest.mark.slow

PAUSED = """
import asyncio, pathlib, sys, time
sys.path.insert(0, sys.argv[4])
from noetl_compactor.archive import archive_past
from noetl_core.blob.file_place import FilePlace
from noetl_core.store.postgres import open_pool
from services.compactor.old_log import rules

signs = pathlib.Path(sys.argv[3])

def after(line):
    if line == sys.argv[2]:
        (signs / "asleep").touch()
        while not (signs / "wake").exists():
            time.sleep(0.01)

async def main():
    async with open_pool(sys.argv[1], role="noetl_compactor", size_max=2) as pool:
        await archive_past(pool, rules(FilePlace(signs / "archive"), after=after))

asyncio.run(main())
"""


@pytest.fixture
async def compactor_pool(database: str) -> AsyncIterator[Pool]:
    async with open_pool(database, role="noetl_compactor", size_max=2) as opened:
        yield opened


async def until(path: Path) -> None:
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(path.exists):  # noqa: ASYNC110 - a process says when
            await asyncio.sleep(0.01)


async def lose_the_leader(pool: Pool) -> None:
    """Its connection is gone, as after a failover; it does not know yet."""
    holder = "FROM pg_locks WHERE locktype = 'advisory'"
    assert await pool.fetchval(f"SELECT pg_terminate_backend(pid) {holder}")
    async with asyncio.timeout(60):
        while await pool.fetchval(f"SELECT count(*) {holder}"):  # noqa: ASYNC110 - Postgres does
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "step", ["surveyed", "begun", "file compared", "file put", "recorded", "published", "checked"]
)
async def test_who_wakes_after_a_successor_has_worked_changes_nothing(
    pool: Pool, compactor_pool: Pool, database: str, tmp_path: Path, step: str
) -> None:
    await a_week(pool)
    for number in range(5):
        await an_execution(pool, number)
    before = [(row[0], row[1]) for row in await rows_of(pool, "event")]
    tests = str(Path(__file__).parents[2])
    first = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PAUSED, database, step, str(tmp_path), tests),
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    await until(tmp_path / "asleep")
    await lose_the_leader(pool)
    place = FilePlace(tmp_path / "archive")

    archived = await archive_past(compactor_pool, rules(place))
    (tmp_path / "wake").touch()
    async with asyncio.timeout(60):
        assert await first.wait() != 0  # it could say nothing more

    assert archived == 5 * len(EVENTS)
    assert await archive_past(compactor_pool, rules(place)) == 0
    assert await rows_of(pool, "event") == await rows_of(pool, "result_ref") == []
    (manifest,) = await pool.fetch("SELECT manifest_id, meta ? 'dropped_at' FROM noetl.manifest")
    assert manifest[1]
    parts = await pool.fetch("SELECT physical_uri FROM noetl.manifest_part WHERE source = 'event'")
    files = [str(tmp_path / "archive" / row[0].removeprefix("archive:")) for row in parts]
    query = "SELECT execution_id, event_id FROM read_parquet($1) ORDER BY ALL"
    assert duckdb.connect().execute(query, [files]).fetchall() == before
    assert await place.names("making/") == []
