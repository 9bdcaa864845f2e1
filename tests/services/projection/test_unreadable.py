"""A row of noetl.execution that cannot be read, or is gone: it is made anew, and stops nobody."""

import msgspec
import pytest

from noetl_cli.rebuild import rebuild_one
from noetl_core.domain.ids import ExecutionId
from noetl_core.store import event
from noetl_core.store.postgres import Pool
from noetl_projection import unreadable
from noetl_projection.memory import Memory
from noetl_projection.project import project
from services.projection.logs import Logged, append, interleaved
from services.projection.test_project import assert_equals_the_fold, project_all, take_over

BROKEN = {
    "an unknown status": """jsonb_set(state, '{status}', '"SUSPENDED"')""",
    "another shape": "'[1, 2]'",
    "a field of another type": """jsonb_set(state, '{execution_id}', '"x"')""",
    "nothing in it": "'{}'",
}


async def half_projected(pool: Pool, projection_pool: Pool) -> tuple[list[Logged], ExecutionId]:
    """Half of a log is projected, the rest is written; and an execution that lies in both."""
    log = interleaved(7, 10)
    half = len(log) // 2
    await append(pool, log[:half])
    await project_all(projection_pool, await take_over(pool, 1))
    await append(pool, log[half:])
    halves = [{one.event.execution_id for one in part} for part in (log[:half], log[half:])]
    return log, min(halves[0] & halves[1])


async def break_row(pool: Pool, execution_id: ExecutionId, how: str) -> None:
    await pool.execute(
        f"UPDATE noetl.execution SET state = {how} WHERE execution_id = $1", execution_id
    )


async def letters(pool: Pool) -> list[tuple[int, str, str]]:
    found = await pool.fetch("SELECT execution_id, source, reason FROM noetl.dead_letter")
    return [tuple(row) for row in found]


@pytest.mark.parametrize("how", BROKEN)
async def test_a_row_that_cannot_be_read_is_made_anew_from_the_log(
    pool: Pool, projection_pool: Pool, how: str
) -> None:
    log, one = await half_projected(pool, projection_pool)
    await break_row(pool, one, BROKEN[how])

    await project_all(projection_pool, await take_over(pool, 2), batch_size=3)

    await assert_equals_the_fold(pool, log)
    assert await letters(pool) == []


async def test_a_row_that_is_gone_is_made_anew_from_the_log(
    pool: Pool, projection_pool: Pool
) -> None:
    log, one = await half_projected(pool, projection_pool)
    await pool.execute("DELETE FROM noetl.execution WHERE execution_id = $1", one)

    await project_all(projection_pool, await take_over(pool, 2), batch_size=3)

    await assert_equals_the_fold(pool, log)
    assert await letters(pool) == []


async def test_a_bad_event_in_an_execution_whose_row_cannot_be_read_is_parked_and_nothing_else(
    pool: Pool, projection_pool: Pool
) -> None:
    log, one = await half_projected(pool, projection_pool)
    bad = [entry.event for entry in log if entry.event.execution_id == one][-1].event_id
    await pool.execute("UPDATE noetl.event SET event_type = 'no.such' WHERE event_id = $1", bad)
    await break_row(pool, one, BROKEN["another shape"])

    await project_all(projection_pool, await take_over(pool, 2))

    await assert_equals_the_fold(pool, [entry for entry in log if entry.event.event_id != bad])
    (letter,) = await pool.fetch("SELECT body FROM noetl.dead_letter")
    assert msgspec.json.decode(letter["body"])["event_id"] == bad


async def others_are_projected(pool: Pool, log: list[Logged], one: ExecutionId) -> None:
    state = await pool.fetchval(
        "DELETE FROM noetl.execution WHERE execution_id = $1 RETURNING state", one
    )
    assert msgspec.json.decode(state) == [1, 2], "the broken row was touched"
    await assert_equals_the_fold(pool, [e for e in log if e.event.execution_id != one])


async def test_an_execution_whose_log_is_gone_too_is_parked_once_and_the_shard_goes_on(
    pool: Pool, projection_pool: Pool
) -> None:
    log, one = await half_projected(pool, projection_pool)
    reached = await pool.fetchval("SELECT max(last_projected_event_id) FROM noetl.execution")
    await pool.execute(
        "DELETE FROM noetl.event WHERE execution_id = $1 AND event_id <= $2", one, reached
    )
    await break_row(pool, one, BROKEN["another shape"])

    for _ in range(2):
        await project_all(projection_pool, await take_over(pool, 2), batch_size=3)

    ((about, source, reason),) = await letters(pool)
    assert (about, source) == (one, "projection")
    assert "not in the log any more" in reason
    await others_are_projected(pool, log, one)


async def test_a_long_log_is_read_once_parked_and_shown_again_after_a_rebuild(
    pool: Pool, projection_pool: Pool, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, one = await half_projected(pool, projection_pool)
    await break_row(pool, one, BROKEN["another shape"])
    monkeypatch.setattr(unreadable, "EVENTS_MAX", 1)
    read_upto, reads = event.read_upto, 0

    async def counted(*arguments: object, **named: object) -> object:
        nonlocal reads
        reads += 1
        return await read_upto(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(event, "read_upto", counted)
    shards, memory = await take_over(pool, 2), Memory(executions_max=100)
    turns = 0
    while await project(projection_pool, shards, memory, batch_size=1):
        turns += 1

    assert turns > 2
    assert reads == 1, "every turn reads the log again"
    ((_, _, reason),) = await letters(pool)
    assert f"rebuild-projection --execution {one}" in reason
    monkeypatch.undo()
    await rebuild_one(database, one)
    await assert_equals_the_fold(pool, log)
    # Its shard has another epoch now: what was given up is looked at again.
    memory.keep({shard: epoch + 1 for shard, epoch in shards.held().items()})
    assert memory.given_up == {}
