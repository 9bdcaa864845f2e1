"""Executions that nothing can move: flagged when the broker was told in vain, and only then."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from noetl_core.bus.connection import Bus
from noetl_core.domain.ids import CommandId, ExecutionId, StepName
from noetl_core.domain.progress import waits_for
from noetl_core.domain.state import ExecutionState, OpenCommand, Parked
from noetl_core.store import stuck
from noetl_core.store.postgres import Pool, open_pool
from noetl_core.wire.messages import Reconcile, decode_messages
from noetl_reaper import lost as lost_module
from noetl_reaper.lost import LostCommands
from noetl_reaper.reported import Reported
from noetl_reaper.sweep import flag_stuck, sweep_executions, sweep_queue
from services.checkpointer.test_commit_epoch import scanned
from services.reaper.test_sweep import add_execution, add_timer, shard, streamed

STUCK_SECONDS = 120
LAST_EVENT = 1
"""Of every execution that add_execution makes."""


@pytest.fixture
async def reaper_pool(database: str) -> AsyncIterator[Pool]:
    async with open_pool(database, role="noetl_reaper", size_max=2) as opened:
        yield opened


@pytest.fixture(autouse=True)
async def _owned(pool: Pool) -> None:
    await pool.execute("UPDATE noetl.execution_shard SET leased_until = now() + interval '1 hour'")


async def flag(pool: Pool) -> int:
    return await flag_stuck(pool, stuck_seconds=STUCK_SECONDS, limit=100)


async def flagged(pool: Pool) -> list[int]:
    rows = await pool.fetch("SELECT execution_id FROM noetl.dead_letter ORDER BY execution_id")
    return [row["execution_id"] for row in rows]


async def parked(pool: Pool, execution_id: int, **fields: Any) -> None:
    """It has one command, and that waits."""
    await add_execution(pool, execution_id, idle_seconds=600)
    command = OpenCommand(step=StepName("hold"), visit=1, parked=Parked(**fields))
    await commands(pool, execution_id, {"hold.1#1": command})


async def commands(pool: Pool, execution_id: int, found: dict[str, OpenCommand]) -> None:
    state = ExecutionState(
        execution_id=ExecutionId(execution_id),
        commands={CommandId(name): command for name, command in found.items()},
    )
    children = waits_for(state)
    await pool.execute(
        "UPDATE noetl.execution SET state = $2, waits_for = $3 WHERE execution_id = $1",
        execution_id,
        msgspec.json.encode(state).decode(),
        None if children is None else [LAST_EVENT, *children],
    )


@pytest.fixture(params=["known", "unknown", "outdated"], autouse=True)
async def _column(request: pytest.FixtureRequest, pool: Pool) -> None:
    """Whatever stands in `waits_for`: what a projection wrote that knows it, nothing, or what was
    so before another projection went on. What is found must be the same.
    """
    change = {"unknown": "NULL", "outdated": f"ARRAY[{LAST_EVENT - 1}]"}.get(request.param)
    if change is not None:
        await pool.execute(
            "CREATE FUNCTION public.other() RETURNS trigger LANGUAGE plpgsql AS"
            f" 'BEGIN NEW.waits_for := {change}; RETURN NEW; END'"
        )
        await pool.execute(
            "CREATE TRIGGER other BEFORE INSERT OR UPDATE ON noetl.execution"
            " FOR EACH ROW EXECUTE FUNCTION public.other()"
        )


async def test_it_is_flagged_once_with_what_a_retry_will_say(pool: Pool, reaper_pool: Pool) -> None:
    await add_execution(pool, 201, idle_seconds=STUCK_SECONDS + 10)
    await add_execution(pool, 202, idle_seconds=STUCK_SECONDS - 10)

    assert [await flag(reaper_pool) for _ in range(3)] == [1, 0, 0]

    row = await pool.fetchrow("SELECT source, body, reason, execution_id FROM noetl.dead_letter")
    assert row is not None
    assert (row["source"], row["execution_id"]) == ("reaper", 201)
    assert decode_messages(row["body"]) == [Reconcile(execution_id=ExecutionId(201))]
    assert "no command, message or timer of it is under way" in row["reason"]


async def test_nobody_is_flagged_while_nobody_owns_the_shard(pool: Pool, reaper_pool: Pool) -> None:
    await add_execution(pool, 201, idle_seconds=600)
    for role in ("broker", "projection"):
        await pool.execute(
            "UPDATE noetl.execution_shard SET leased_until = now() - interval '1 s'"
            " WHERE role = $1 AND shard_id = $2",
            role,
            shard(201),
        )
        assert await flag(reaper_pool) == 0
        await pool.execute("UPDATE noetl.execution_shard SET leased_until = now() + interval '1 h'")

    assert await flag(reaper_pool) == 1


async def test_what_waits_for_somebody_is_neither_idle_nor_stuck(
    pool: Pool, reaper_pool: Pool, bus: Bus
) -> None:
    await parked(pool, 201, kind="approval", signal="hold")
    await parked(pool, 202, kind="wait", signal="go")
    await add_execution(pool, 203, idle_seconds=600)
    await add_timer(pool, 203, "wait:hold.1#1", due_seconds_ago=-60)
    await parked(pool, 204, kind="playbook", child=ExecutionId(900))
    await add_execution(pool, 900, idle_seconds=0)
    await parked(pool, 205, kind="playbook", child=ExecutionId(901))
    await pool.execute(
        "INSERT INTO noetl.inbox (shard_id, execution_id, body) VALUES (99, 901, '')"
    )

    reported: Reported[ExecutionId] = Reported(repeat_seconds=15)
    assert await sweep_executions(reaper_pool, bus, reported, idle_seconds=30, limit=100) == 0
    assert await flag(reaper_pool) == 0


async def test_a_parent_whose_child_has_ended_without_a_word_is_stuck(
    pool: Pool, reaper_pool: Pool
) -> None:
    await parked(pool, 201, kind="playbook", child=ExecutionId(900))
    await add_execution(pool, 900, idle_seconds=600, status="COMPLETED")
    await parked(pool, 202, kind="playbook", child=ExecutionId(901))

    await flag(reaper_pool)

    assert await flagged(pool) == [201, 202]


async def test_a_lost_command_beside_one_that_waits_is_seen(
    pool: Pool, reaper_pool: Pool, bus: Bus
) -> None:
    await parked(pool, 201, kind="approval", signal="hold")
    waits = OpenCommand(step=StepName("hold"), visit=1, parked=Parked(kind="approval", signal="x"))
    lost = OpenCommand(step=StepName("load"), visit=1)
    await commands(pool, 201, {"hold.1#1": waits, "load.1#1": lost})

    reported: Reported[ExecutionId] = Reported(repeat_seconds=15)
    assert await sweep_executions(reaper_pool, bus, reported, idle_seconds=30, limit=100) == 1


@pytest.mark.parametrize(
    "state",
    [
        "[1, 2]",
        '{"commands": []}',
        '{"commands": {"load.1#1": 7}}',
        '{"commands": {"load.1#1": {"parked": 7}}}',
        '{"commands": {"load.1#1": {"parked": {"kind": "playbook", "child": "x"}}}}',
    ],
)
async def test_a_state_that_is_broken_keeps_no_other_from_being_found(
    pool: Pool, reaper_pool: Pool, bus: Bus, state: str
) -> None:
    await add_execution(pool, 201, idle_seconds=600)
    await pool.execute("UPDATE noetl.execution SET state = $1", state)
    await add_execution(pool, 202, idle_seconds=600)

    reported: Reported[ExecutionId] = Reported(repeat_seconds=15)
    assert await sweep_executions(reaper_pool, bus, reported, idle_seconds=30, limit=100) == 2
    await LostCommands().look(reaper_pool)


async def queued(pool: Pool, execution_id: int, name: str) -> None:
    await pool.execute(
        "INSERT INTO noetl.command (execution_id, command_id, shard_id, step, payload)"
        " VALUES ($1, $2, 0, 'load', '')",
        execution_id,
        name,
    )


async def test_a_command_that_is_not_in_the_queue_at_two_looks_is_lost_whatever_else_goes_on(
    pool: Pool, reaper_pool: Pool, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_module, "EXECUTIONS_MAX", 2)
    waits = OpenCommand(step=StepName("hold"), visit=1, parked=Parked(kind="wait", until_ms=2**42))
    works = OpenCommand(step=StepName("load"), visit=1)
    for execution_id in range(201, 206):
        await add_execution(pool, execution_id, idle_seconds=0)
        await commands(
            pool, execution_id, {"hold.1#1": waits, "load.1/0#1": works, "load.1/1#1": works}
        )
        await add_timer(pool, execution_id, "wait:hold.1#1", due_seconds_ago=-3600)
        await queued(pool, execution_id, "load.1/0#1")
        if execution_id != 205:
            await queued(pool, execution_id, "load.1/1#1")
    lost, reported = LostCommands(), Reported[ExecutionId](repeat_seconds=15)

    async def look() -> int:
        return await sweep_queue(reaper_pool, bus, reported, lost, leads=True, limit=100)

    await pool.execute("DELETE FROM noetl.command WHERE execution_id = 202")

    looks = [await look() for _ in range(3)]
    assert looks == [0, 0, 0], "the projection may be behind"
    await commands(pool, 202, {"load.1/0#2": works})
    again = [await look() for _ in range(3)]

    assert again == [0, 0, 1]
    ((_, told),) = await streamed(bus)
    assert told == Reconcile(execution_id=ExecutionId(205))


@pytest.mark.parametrize(
    "change", ["updated_at = now() + interval '1 s'", "status = 'CANCELLED'", "status = 'PAUSED'"]
)
async def test_the_flag_goes_when_it_moves_or_need_not_any_more(
    pool: Pool, reaper_pool: Pool, change: str
) -> None:
    await add_execution(pool, 201, idle_seconds=600)
    await flag(reaper_pool)
    await pool.execute(f"UPDATE noetl.execution SET {change}")

    assert await flag(reaper_pool) == 0

    assert await flagged(pool) == []


async def test_what_others_have_set_aside_is_left_alone(pool: Pool, reaper_pool: Pool) -> None:
    await add_execution(pool, 201, idle_seconds=0)
    await pool.execute(
        "INSERT INTO noetl.dead_letter (execution_id, source, body, reason, created_at)"
        " VALUES (201, 'broker', '', 'x', now() - interval '1 h')"
    )

    await flag(reaper_pool)

    assert await flagged(pool) == [201]


async def test_to_find_the_idle_ones_among_many_timers_no_table_is_read_for_each_of_them(
    pool: Pool,
) -> None:
    many = 2000
    await pool.execute(
        "INSERT INTO noetl.execution (execution_id, catalog_id, path, version, shard_id, status,"
        " state, ctx, progress, last_event_type, last_projected_event_id, started_at, updated_at)"
        " SELECT i, 1, 'p', 1, 0, 'RUNNING', $2, '{}', '{}', 'step.enter', 1, now(),"
        " now() - interval '1 hour' FROM generate_series(1, $1::integer) AS i",
        many,
        '{"commands": {"load.1#1": {"step": "load"}}}',
    )
    await pool.execute(
        "INSERT INTO noetl.timer (execution_id, timer, due_at)"
        " SELECT i, 'step:load.1', now() FROM generate_series(1, $1::integer) AS i",
        many,
    )
    await pool.execute(
        "INSERT INTO noetl.command (execution_id, command_id, shard_id, step, payload)"
        " SELECT -i, 'load.1#1', 0, 'load', '' FROM generate_series(1, $1::integer) AS i",
        many,
    )
    await pool.execute("ANALYZE")

    for sql, arguments in (
        (stuck._OLDEST_IDLE, (30.0, stuck._WAITS, many)),
        (stuck._LOST, (0, many, many)),
    ):
        read = await scanned(pool, sql, *arguments)
        for name in ("timer", "command"):
            rows = sum(count for table, count in read.items() if table.startswith(name))
            assert rows <= 2 * many, (name, rows)
