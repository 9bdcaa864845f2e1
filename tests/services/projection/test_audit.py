"""Rows that are not what their log says: found, told, mended; and a rebuild of all of them."""

import asyncio
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path
from typing import Any

import pytest

from noetl_cli.failure import CommandFailed
from noetl_cli.rebuild import rebuild_all, rebuild_one
from noetl_core.domain.ids import EventId, ExecutionId
from noetl_core.domain.sharding import shard_of
from noetl_core.store import event, execution_projection, execution_shard, refold, setting
from noetl_core.store.postgres import Pool
from noetl_projection.audit import Round, audit
from noetl_projection.memory import Memory
from noetl_projection.project import project
from services.projection.logs import (
    FIRST_EXECUTION,
    SHARD_COUNT,
    append,
    interleaved,
    shard,
)
from services.projection.test_project import ALL_SHARDS, project_all, rows, take_over

FIRST = ExecutionId(FIRST_EXECUTION)


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


async def test_a_row_that_is_gone_is_found_told_and_written_anew(
    pool: Pool, projection_pool: Pool
) -> None:
    await append(pool, interleaved(4, 6))
    await project_all(projection_pool, await take_over(pool, 1))
    right = await rows(pool)
    await pool.execute("DELETE FROM noetl.execution WHERE execution_id = $1", FIRST)

    found = await audit(projection_pool, ALL_SHARDS, limit=3, at=Round(ExecutionId(0)))

    assert found == 1
    assert await rows(pool) == right
    (letter,) = await letters(pool)
    assert letter.startswith("projection.differs: the execution had no row")


@pytest.mark.parametrize("shares", [1, 3])
async def test_looks_that_follow_each_other_go_through_all_of_the_log(
    pool: Pool, projection_pool: Pool, shares: int
) -> None:
    await append(pool, interleaved(4, 20))
    await project_all(projection_pool, await take_over(pool, 1))
    right = await rows(pool)
    await pool.execute("TRUNCATE noetl.execution")

    for share in range(shares):
        shards, at = ALL_SHARDS[share::shares], Round()
        looks = [await audit(projection_pool, shards, limit=2, at=at) for _ in range(22)]
        assert sum(looks) > 0

    assert await rows(pool) == right


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


async def put_back(pool: Pool, execution_id: ExecutionId, *, events: int) -> None:
    """Let the row stand where it stood after its first few events, right for that moment."""
    ids = await pool.fetch(
        "SELECT event_id FROM noetl.event WHERE execution_id = $1 ORDER BY event_id", execution_id
    )
    early = await refold.refold(pool, execution_id, upto=EventId(ids[events - 1][0]))
    assert early is not None
    async with pool.acquire() as conn:
        assert await execution_projection.rewrite(conn, early, seen=EventId(ids[-1][0]))


async def test_a_row_that_is_behind_its_watermark_is_found(
    pool: Pool, projection_pool: Pool
) -> None:
    await append(pool, interleaved(4, 6))
    await project_all(projection_pool, await take_over(pool, 1))
    right = await rows(pool)
    await put_back(pool, FIRST, events=2)

    assert await audit(projection_pool, ALL_SHARDS, limit=100) == 1

    assert await rows(pool) == right


async def test_what_is_not_projected_yet_is_no_difference(
    pool: Pool, projection_pool: Pool
) -> None:
    logged = interleaved(4, 6)
    await append(pool, logged)
    await project(
        projection_pool, await take_over(pool, 1), Memory(executions_max=100), batch_size=3
    )
    assert await pool.fetchval("SELECT max(last_projected_event_id) FROM noetl.execution") < max(
        one.event.event_id for one in logged
    )

    assert await audit(projection_pool, ALL_SHARDS, limit=100) == 0


async def test_an_execution_that_is_archived_while_it_is_compared_does_not_differ(
    pool: Pool, projection_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await append(pool, interleaved(4, 1, items=60))
    await project_all(projection_pool, await take_over(pool, 1))
    right = await rows(pool)
    read_upto, pages = event.read_upto, 0

    async def read_page(*arguments: Any, **named: Any) -> Any:
        nonlocal pages
        pages += 1
        if pages == 2:
            await pool.execute("DELETE FROM noetl.event")
        return await read_upto(*arguments, **named)

    monkeypatch.setattr(refold, "PAGE_SIZE", 50)
    monkeypatch.setattr(event, "read_upto", read_page)

    assert await audit(projection_pool, ALL_SHARDS, limit=10) == 0
    assert pages == 2
    assert await rows(pool) == right
    assert await letters(pool) == []


async def test_an_execution_that_is_archived_after_it_was_compared_is_left_as_it_is(
    pool: Pool, projection_pool: Pool
) -> None:
    await append(pool, interleaved(4, 1))
    await project_all(projection_pool, await take_over(pool, 1))
    await pool.execute("UPDATE noetl.execution SET path = 'changed'")
    found = await refold.compare(pool, FIRST)
    assert found is not None
    await pool.execute("DELETE FROM noetl.event")

    await refold.heal(projection_pool, [found])

    assert await pool.fetchval("SELECT path FROM noetl.execution") == "changed"
    assert await letters(pool) == []


async def test_a_row_that_has_moved_is_not_written_over(pool: Pool, projection_pool: Pool) -> None:
    await append(pool, interleaved(4, 1))
    await project_all(projection_pool, await take_over(pool, 1))
    newest = await rows(pool)
    early = await refold.refold(pool, FIRST, upto=EventId(FIRST_EXECUTION * 2 + 2))
    assert early is not None

    async with projection_pool.acquire() as conn:
        for seen in (None, early.last_event_id):
            assert not await execution_projection.rewrite(conn, early, seen=seen)

    assert await rows(pool) == newest


async def test_a_row_is_mended_under_the_fence_of_the_shard_it_has_gone_to(
    pool: Pool, projection_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard count changes between the look at it and the fence."""
    await append(pool, interleaved(4, 1))
    await project_all(projection_pool, await take_over(pool, 1))
    right = await rows(pool)
    await pool.execute("UPDATE noetl.execution SET path = 'wrong'")
    found = await refold.compare(pool, FIRST)
    assert found is not None
    shards = next(n for n in range(17, 64) if shard_of(FIRST, shard_count=n) >= SHARD_COUNT)
    counted, asked = setting.shard_count, 0

    async def count(conn: Any) -> int:
        nonlocal asked
        asked += 1
        answer = await counted(conn)
        if asked == 1:
            async with pool.acquire() as other, other.transaction():
                await execution_shard.lock_all(other)
                await execution_shard.begin_anew(other, shard_count=shards)
                await other.execute(
                    "UPDATE noetl.setting SET value = to_jsonb($1::integer)"
                    " WHERE name = 'shard_count'",
                    shards,
                )
        return answer

    monkeypatch.setattr(setting, "shard_count", count)
    epoch = "SELECT epoch FROM noetl.execution_shard WHERE role = 'projection' AND shard_id = $1"
    await refold.heal(projection_pool, [found])

    assert await pool.fetchval(epoch, shard_of(FIRST, shard_count=shards)) == 1
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
