"""Rows that are not what their log says: found, told, mended; and a rebuild of all of them."""

import asyncio
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from noetl_cli.failure import CommandFailed
from noetl_cli.rebuild import rebuild_all, rebuild_one
from noetl_core.domain.ids import ExecutionId
from noetl_core.store import refold
from noetl_core.store.postgres import Pool, open_pool
from noetl_projection.audit import audit
from noetl_projection.memory import Memory
from noetl_projection.project import project
from services.projection.logs import FIRST_EXECUTION, append, interleaved, shard
from services.projection.test_project import ALL_SHARDS, project_all, rows, take_over

FIRST = ExecutionId(FIRST_EXECUTION)


@pytest.fixture
async def projection_pool(database: str) -> AsyncIterator[Pool]:
    async with open_pool(database, role="noetl_projection", size_max=4) as opened:
        yield opened


def nothing(_folded: int, _written: int) -> None: ...


async def letters(pool: Pool) -> list[str]:
    found = await pool.fetch("SELECT source, reason FROM noetl.dead_letter")
    return [f"{row['source']}: {row['reason']}" for row in found]


async def test_an_audit_of_what_was_projected_finds_nothing(
    pool: Pool, projection_pool: Pool
) -> None:
    await append(pool, interleaved(3, 20))
    await project_all(projection_pool, await take_over(pool, 1))

    assert await audit(projection_pool, ALL_SHARDS, limit=100) == 0
    assert await letters(pool) == []


@pytest.mark.parametrize(
    ("tamper", "column"),
    [
        ("state = jsonb_set(state, '{ctx}', '{\"wrong\": 1}')", "state"),
        ("progress = '{}'", "progress"),
        ("status = 'CANCELLED'", "status"),
        ("waiting_on = 'Godot'", "waiting_on"),
        ("ctx = '{\"wrong\": 1}'", "ctx"),
        ("ended_at = now()", "ended_at"),
    ],
)
async def test_a_tampered_row_is_found_told_and_written_anew(
    pool: Pool, projection_pool: Pool, tamper: str, column: str
) -> None:
    await append(pool, interleaved(4, 6))
    await project_all(projection_pool, await take_over(pool, 1))
    right = await rows(pool)
    await pool.execute(f"UPDATE noetl.execution SET {tamper} WHERE execution_id = $1", FIRST)

    assert await audit(projection_pool, ALL_SHARDS, limit=100) == 1

    assert await rows(pool) == right
    (letter,) = await letters(pool)
    assert letter.startswith("projection.differs: ")
    assert column in letter


async def test_an_audit_looks_only_at_the_shards_it_is_given(
    pool: Pool, projection_pool: Pool
) -> None:
    await append(pool, interleaved(4, 6))
    await project_all(projection_pool, await take_over(pool, 1))
    await pool.execute("UPDATE noetl.execution SET progress = '{}' WHERE execution_id = $1", FIRST)

    others = [one for one in ALL_SHARDS if one != shard(FIRST)]

    assert await audit(projection_pool, others, limit=100) == 0


async def test_a_projection_that_runs_goes_on_from_the_mended_row(
    pool: Pool, projection_pool: Pool
) -> None:
    logged = interleaved(6, 5)
    half = len(logged) // 2
    await append(pool, logged[:half])
    shards, memory = await take_over(pool, 1), Memory(executions_max=100)
    while await project(projection_pool, shards, memory, batch_size=500):
        pass
    await pool.execute("UPDATE noetl.execution SET state = jsonb_set(state, '{ctx}', '{\"w\": 1}')")
    wrong = await pool.fetchval("SELECT count(*) FROM noetl.execution")

    assert await audit(projection_pool, ALL_SHARDS, limit=100) == wrong
    await append(pool, logged[half:])
    # The state in memory is refused by the fence; the next owner reads the row.
    await project(projection_pool, shards, memory, batch_size=500)
    await project_all(projection_pool, await take_over(pool, 2))

    assert await audit(projection_pool, ALL_SHARDS, limit=100) == 0


async def test_a_log_that_is_too_long_is_left_out_of_an_audit(
    pool: Pool, projection_pool: Pool
) -> None:
    await append(pool, interleaved(4, 1, items=50))
    await project_all(projection_pool, await take_over(pool, 1))

    with pytest.raises(refold.LongLogError):
        await refold.compare(pool, FIRST, events_max=20)


async def test_an_execution_without_events_is_left_as_it_is(
    pool: Pool, projection_pool: Pool, database: str
) -> None:
    await append(pool, interleaved(4, 3))
    await project_all(projection_pool, await take_over(pool, 1))
    await pool.execute("DELETE FROM noetl.event WHERE execution_id = $1", FIRST)
    right = await rows(pool)

    assert (await rebuild_all(database, nothing)).written == 0
    assert await rows(pool) == right


async def test_a_rebuild_gives_the_same_bytes_for_rows_that_are_wrong_or_missing(
    pool: Pool, projection_pool: Pool, database: str
) -> None:
    await append(pool, interleaved(8, 30))
    await project_all(projection_pool, await take_over(pool, 1))
    right = await rows(pool)
    ids = [row[0] for row in await pool.fetch("SELECT execution_id FROM noetl.execution")]
    await pool.execute("DELETE FROM noetl.execution WHERE execution_id = ANY ($1)", ids[:10])
    await pool.execute("UPDATE noetl.execution SET status = 'PENDING' WHERE execution_id > $1", 0)
    told: list[int] = []

    done = await rebuild_all(database, lambda folded, _written: told.append(folded))

    assert await rows(pool) == right
    assert done == (30, 30)
    assert told == [30]


async def test_a_rebuild_while_a_projection_runs_ends_with_what_the_log_says(
    pool: Pool, projection_pool: Pool, database: str
) -> None:
    logged = interleaved(9, 12)
    shards, memory = await take_over(pool, 1), Memory(executions_max=100)

    async def run() -> None:
        for start in range(0, len(logged), 20):
            await append(pool, logged[start : start + 20])
            await project(projection_pool, shards, memory, batch_size=50)
            if len(shards.epochs) < len(ALL_SHARDS):
                shards.epochs.update((await take_over(pool, 1)).epochs)
            await pool.execute("UPDATE noetl.execution SET progress = '{}'")
            await asyncio.sleep(0)

    running = asyncio.create_task(run())
    while not running.done():
        await rebuild_all(database, nothing)
    await running
    await project_all(projection_pool, await take_over(pool, 2))
    await rebuild_all(database, nothing)

    assert await audit(projection_pool, ALL_SHARDS, limit=100) == 0


async def test_one_execution_is_rebuilt_and_an_unknown_one_is_named(
    pool: Pool, projection_pool: Pool, database: str
) -> None:
    await append(pool, interleaved(4, 3))
    await project_all(projection_pool, await take_over(pool, 1))
    right = await rows(pool)
    await pool.execute("DELETE FROM noetl.execution WHERE execution_id = $1", FIRST)

    assert await rebuild_one(database, FIRST) == (1, 1)
    assert await rows(pool) == right
    with pytest.raises(CommandFailed, match="there is no execution 12"):
        await rebuild_one(database, ExecutionId(12))


async def test_the_command_says_what_it_did(
    pool: Pool, projection_pool: Pool, database: str
) -> None:
    await append(pool, interleaved(4, 3))
    await project_all(projection_pool, await take_over(pool, 1))
    await pool.execute("UPDATE noetl.execution SET path = 'wrong' WHERE execution_id = $1", FIRST)
    noetl = Path(sys.executable).with_name("noetl")

    async def run(*options: str) -> tuple[int | None, str]:
        command = [str(noetl), "db", "rebuild-projection", "--dsn", database, *options]
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT)
        out, _ = await process.communicate()
        return process.returncode, out.decode().splitlines()[-1]

    assert await run("--execution", "12") == (2, "there is no execution 12")
    assert await run() == (0, "3 executions folded, 1 rows written anew")
    assert await run("--execution", str(FIRST)) == (0, "1 executions folded, 0 rows written anew")
