"""What begins and ends in one turn of the broker leaves nothing behind."""

import pytest

from noetl_core.domain.brief import decode_brief
from noetl_core.domain.ids import ExecutionId
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Done, Due, Parked, Signal
from services.broker.desk import WORKER, Desk, done, stored_json

HEAD = "apiVersion: noetl.io/v2\nkind: Playbook\nmetadata: {name: p}\n"

TIMED = """workflow:
  - step: each
    spec: {timeout: 5m}
    loop: {in: [1, 2, 3], spec: {max_in_flight: 1}}
    tool: {kind: noop}
    next: {arcs: [{step: late, when: "{{ event.name == 'step.failed' }}"}]}
  - step: late
    tool: {kind: wait, signal: go, timeout: 1h}
    next: {arcs: [{step: after}]}
  - step: after
    tool: {kind: noop}
"""

CLAIMS = """workflow:
  - step: work
    loop: {cursor: {kind: postgres, auth: pg, claim: take}, spec: {mode: cursor, max_in_flight: 1}}
    tool: {kind: noop}
    next: {arcs: [{step: second}]}
  - step: second
    loop: {in: "{{ work.results }}"}
    tool: {kind: noop}
"""


@pytest.fixture
async def desk(pool: Pool) -> Desk:
    desk = Desk(pool)
    await desk.claim()
    return desk


async def rows(pool: Pool, execution_id: ExecutionId) -> list[str]:
    found = await pool.fetch(
        "SELECT command_id FROM noetl.command WHERE execution_id = $1", execution_id
    )
    return [row["command_id"] for row in found]


async def waits(pool: Pool, execution_id: ExecutionId) -> list[str]:
    found = await pool.fetch(
        "SELECT timer FROM noetl.timer WHERE execution_id = $1 AND timer LIKE 'wait:%'",
        execution_id,
    )
    return [row["timer"] for row in found]


async def test_a_command_that_is_issued_and_dropped_in_one_turn_has_no_row(
    desk: Desk, pool: Pool
) -> None:
    execution_id = await desk.start(HEAD + TIMED)
    (leased,) = await desk.lease()

    await desk.send(
        done(execution_id, leased.command_id, 1),
        Due(execution_id=execution_id, timer="step:each.1"),
    )

    assert await rows(pool, execution_id) == ["late.1#1"]


@pytest.mark.parametrize("is_early", [True, False])
async def test_a_wait_that_a_signal_has_ended_leaves_no_timer(
    desk: Desk, pool: Pool, is_early: bool
) -> None:
    execution_id = await desk.start(HEAD + TIMED)
    await desk.send(Due(execution_id=execution_id, timer="step:each.1"))
    (leased,) = await desk.lease()
    signal = Signal(execution_id=execution_id, signal_id=1, name="go")
    parked = Parked(
        execution_id=execution_id,
        command_id=leased.command_id,
        worker_id=WORKER,
        kind="wait",
        signal="go",
        until_ms=1_900_000_000_000,
    )

    for message in (signal, parked) if is_early else (parked, signal):
        await desk.send(message)

    assert await rows(pool, execution_id) == ["after.1#1"]
    assert await waits(pool, execution_id) == []


async def test_the_frame_that_found_no_rows_is_no_result_of_its_loop(desk: Desk) -> None:
    execution_id = await desk.start(HEAD + CLAIMS)
    for rows_claimed in (2, 0):
        (leased,) = await desk.lease()
        await desk.send(
            Done(
                execution_id=execution_id,
                command_id=leased.command_id,
                worker_id=WORKER,
                stored=stored_json(f"{rows_claimed} rows"),
                frame_rows=rows_claimed,
            )
        )

    briefs = [decode_brief(row.payload) for row in await desk.lease()]
    assert [brief.element and brief.element.value for brief in briefs] == ["2 rows"]
