"""What the broker writes beside the log: children, timers, held commands, pages, redone loops."""

import msgspec
import pytest

from noetl_core.domain.errors import ToolError
from noetl_core.domain.ids import CatalogId, ExecutionId, StepName
from noetl_core.store.command import Leased
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import (
    Cancel,
    Done,
    Due,
    Failed,
    Parked,
    Pause,
    Resume,
    Retry,
    Signal,
)
from services.broker.desk import WORKER, Desk, done, stored_json

HEAD = "apiVersion: noetl.io/v2\nkind: Playbook\nmetadata: {name: p}\n"

PARENT = """workflow:
  - step: call
    tool: {kind: playbook, path: child, return_step: sum}
    next: {arcs: [{step: use, when: "{{ call.total > 2 }}"}, {step: sorry}]}
  - step: use
    tool: {kind: noop}
  - step: sorry
    tool: {kind: noop}
"""

CHILD = """workflow:
  - step: sum
    tool: {kind: noop}
    next: {arcs: [{step: log}]}
  - step: log
    tool: {kind: noop}
"""

PAGES = """workflow:
  - step: fetch
    tool: {kind: noop}
    retry:
      on_success:
        while: "{{ response.more }}"
        merge_path: rows
        next_call: {params: {page: "{{ response.page + 1 }}"}}
    next: {arcs: [{step: each}]}
  - step: each
    loop: {in: "{{ fetch.results }}"}
    tool: {kind: noop}
"""

TIMED = """executor: {spec: {timeout: 1h}}
workflow:
  - step: each
    spec: {timeout: 5m}
    loop: {in: [1, 2]}
    tool: {kind: noop}
    next: {arcs: [{step: late, when: "{{ event.name == 'step.failed' }}"}]}
  - step: late
    tool: {kind: wait, seconds: 5}
"""

SPREAD = """workflow:
  - step: spread
    spec: {loop_mode: fanout, fanout: {max_shard_retries: 0}}
    loop: {in: [0, 1, 2, 3]}
    tool: {kind: noop}
    next:
      arcs:
        - {step: good, when: "{{ fanin.status == 'complete' }}"}
  - step: good
    loop: {in: "{{ spread.results }}"}
    tool: {kind: noop}
"""


@pytest.fixture
async def desk(pool: Pool) -> Desk:
    desk = Desk(pool)
    await desk.claim()
    return desk


async def one(desk: Desk) -> Leased:
    (leased,) = await desk.lease()
    return leased


def parked(leased: Leased, catalog_id: CatalogId, step: str | None = None) -> Parked:
    return Parked(
        execution_id=leased.execution_id,
        command_id=leased.command_id,
        worker_id=WORKER,
        kind="playbook",
        catalog_id=catalog_id,
        path="child",
        version=1,
        payload=stored_json({"n": 1}),
        return_step=None if step is None else StepName(step),
    )


async def call_child(desk: Desk) -> ExecutionId:
    """A parent waits for a child that is started; gives the parent."""
    parent = await desk.start(HEAD + PARENT)
    child = await desk.register(HEAD + CHILD)
    await desk.send(parked(await one(desk), child, "sum"))
    assert await desk.empty_inbox() == 1
    return parent


async def status(pool: Pool, execution_id: ExecutionId) -> str:
    found: str = await pool.fetchval(
        "SELECT event_type FROM noetl.event WHERE execution_id = $1 ORDER BY event_id DESC LIMIT 1",
        execution_id,
    )
    return found


async def test_a_child_runs_and_gives_its_result_to_the_parent(desk: Desk, pool: Pool) -> None:
    parent = await call_child(desk)
    assert not await pool.fetchval(
        "SELECT count(*) FROM noetl.command WHERE execution_id = $1", parent
    )

    summing = await one(desk)
    await desk.send(done(summing.execution_id, summing.command_id, {"total": 3}))
    logging = await one(desk)
    await desk.send(done(logging.execution_id, logging.command_id, None))
    await desk.empty_inbox()

    leased = await one(desk)
    assert (leased.execution_id, leased.step) == (parent, "use")
    (row,) = await pool.fetch(
        "SELECT parent_execution_id, context->>'parent_command_id' AS command FROM noetl.event "
        "WHERE execution_id = $1 AND event_type = 'execution.started'",
        summing.execution_id,
    )
    assert (row["parent_execution_id"], row["command"]) == (parent, "call.1#1")


async def test_a_message_between_executions_that_comes_twice_counts_once(desk: Desk) -> None:
    parent = await desk.start(HEAD + PARENT)
    child = await desk.register(HEAD + CHILD)
    message = parked(await one(desk), child)
    await desk.send(message)
    await desk.send(message)

    assert await desk.empty_inbox() == 1
    assert (await desk.types(parent)).count("command.parked") == 1


async def test_who_cancels_a_parent_cancels_its_children(desk: Desk, pool: Pool) -> None:
    parent = await call_child(desk)
    child = (await one(desk)).execution_id

    await desk.send(Cancel(execution_id=parent))
    await desk.empty_inbox()

    assert await status(pool, child) == "execution.cancelled"


async def test_a_child_that_fails_is_told_to_the_parent(desk: Desk, pool: Pool) -> None:
    parent = await call_child(desk)
    leased = await one(desk)
    error = ToolError(kind="boom", message="no luck")
    await desk.send(
        Failed(
            execution_id=leased.execution_id,
            command_id=leased.command_id,
            worker_id=WORKER,
            error=error,
        )
    )
    await desk.empty_inbox()

    assert await status(pool, parent) == "execution.failed"


async def test_a_paused_execution_hands_nothing_out_until_it_is_resumed(desk: Desk) -> None:
    execution_id = await desk.start(HEAD + SPREAD)
    first = (await desk.lease(limit=1))[0]
    await desk.send(Pause(execution_id=execution_id))
    assert await desk.lease() == []

    await desk.send(done(execution_id, first.command_id, 0))
    assert await desk.lease() == []

    await desk.send(Resume(execution_id=execution_id))
    assert len(await desk.lease()) == 3


async def test_a_pause_reaches_the_children(desk: Desk) -> None:
    parent = await call_child(desk)
    await desk.send(Pause(execution_id=parent))
    await desk.empty_inbox()
    assert await desk.lease() == []

    await desk.send(Resume(execution_id=parent))
    await desk.empty_inbox()
    assert len(await desk.lease()) == 1


async def timers(pool: Pool, execution_id: ExecutionId) -> list[str]:
    rows = await pool.fetch(
        "SELECT timer FROM noetl.timer WHERE execution_id = $1 ORDER BY timer", execution_id
    )
    return [row["timer"] for row in rows]


async def test_timers_are_set_used_up_and_gone_with_their_execution(desk: Desk, pool: Pool) -> None:
    execution_id = await desk.start(HEAD + TIMED)
    assert await timers(pool, execution_id) == ["execution", "step:each.1"]

    await desk.send(Due(execution_id=execution_id, timer="step:each.1"))
    assert await timers(pool, execution_id) == ["execution"]
    leased = await one(desk)
    assert leased.step == "late"

    await desk.send(
        Parked(
            execution_id=execution_id,
            command_id=leased.command_id,
            worker_id=WORKER,
            kind="wait",
            until_ms=1_900_000_000_000,
        )
    )
    assert await timers(pool, execution_id) == ["execution", "wait:late.1#1"]

    await desk.send(Due(execution_id=execution_id, timer="wait:late.1#1"))
    assert await status(pool, execution_id) == "execution.completed"
    assert await timers(pool, execution_id) == []


async def test_an_execution_that_is_parked_leaves_no_timer(desk: Desk, pool: Pool) -> None:
    execution_id = await desk.start(HEAD + TIMED)
    await desk.send(Due(execution_id=execution_id, timer="execution"))

    assert await timers(pool, execution_id) == []
    assert await desk.lease() == []


def page(leased: Leased, number: int, *, more: bool, is_pushed: bool = True) -> Done:
    value = {"rows": [number * 10, number * 10 + 1], "page": number, "more": more}
    return Done(
        execution_id=leased.execution_id,
        command_id=leased.command_id,
        worker_id=WORKER,
        stored=stored_json(value),
        context={"more": more, "page": number} if is_pushed else {},
    )


@pytest.mark.parametrize("is_pushed", [True, False])
async def test_the_pages_of_a_call_are_collected_in_the_turn_that_ends_them(
    desk: Desk, pool: Pool, *, is_pushed: bool
) -> None:
    execution_id = await desk.start(HEAD + PAGES)
    await desk.send(page(await one(desk), 1, more=True, is_pushed=is_pushed))
    await desk.send(page(await one(desk), 2, more=True, is_pushed=is_pushed))
    await desk.send(page(await one(desk), 3, more=False, is_pushed=is_pushed))

    assert len(await desk.lease()) == 6
    (row,) = await pool.fetch("SELECT * FROM noetl.manifest WHERE kind = 'pages'")
    assert (row["execution_id"], row["item_count"], row["step"]) == (execution_id, 3, "fetch")
    parts = await pool.fetch(
        "SELECT part_index, store_tier FROM noetl.manifest_part WHERE manifest_id = $1 "
        "ORDER BY part_index",
        row["manifest_id"],
    )
    assert [tuple(part) for part in parts] == [(0, "result"), (1, "result"), (2, "result")]


async def test_only_failed_shards_run_again_and_all_results_are_there(
    desk: Desk, pool: Pool
) -> None:
    execution_id = await desk.start(HEAD + SPREAD)
    for leased in await desk.lease():
        index = leased.command_id.split("/")[1][0]
        await desk.send(
            done(execution_id, leased.command_id, int(index))
            if index in "02"
            else Failed(
                execution_id=execution_id,
                command_id=leased.command_id,
                worker_id=WORKER,
                error=ToolError(kind="boom", message="no"),
            )
        )
    assert await status(pool, execution_id) == "execution.completed"

    await desk.send(Retry(execution_id=execution_id, step=StepName("spread")))
    again = await desk.lease()
    assert sorted(leased.command_id for leased in again) == ["spread.2/1#1", "spread.2/3#1"]

    await desk.send(*(done(execution_id, leased.command_id, 10) for leased in again))
    assert len(await desk.lease()) == 4
    collection = await pool.fetchval(
        "SELECT p.inline FROM noetl.manifest m JOIN noetl.manifest_part p USING (manifest_id) "
        "WHERE m.step = 'good'"
    )
    assert msgspec.json.decode(collection) == [0, 10, 2, 10]


async def test_a_retry_in_the_turn_that_ends_an_execution_loses_nothing(desk: Desk) -> None:
    execution_id = await desk.start(HEAD + CHILD)
    leased = await one(desk)
    failed = Failed(
        execution_id=execution_id,
        command_id=leased.command_id,
        worker_id=WORKER,
        error=ToolError(kind="boom", message="no"),
    )
    await desk.send(failed, Retry(execution_id=execution_id))
    await desk.empty_inbox()

    assert [leased.command_id for leased in await desk.lease()] == ["sum.2#1"]


async def test_a_signal_whose_answer_was_lost_is_recorded_once(desk: Desk, pool: Pool) -> None:
    execution_id = await desk.start(HEAD + "workflow: [{step: a, tool: {kind: wait, signal: go}}]")
    leased = await one(desk)
    await desk.send(
        Parked(
            execution_id=execution_id,
            command_id=leased.command_id,
            worker_id=WORKER,
            kind="wait",
            signal="go",
        )
    )
    signal = Signal(execution_id=execution_id, signal_id=77, name="go", data=stored_json({"x": 1}))
    await desk.send(signal)
    await desk.send(signal)

    types = await desk.types(execution_id)
    assert types.count("signal.received") == 1
    assert types[-1] == "execution.completed"


async def test_an_execution_that_cannot_go_on_tells_its_parent(desk: Desk, pool: Pool) -> None:
    parent = await desk.start(HEAD + PARENT)
    leased = await one(desk)
    nowhere = CatalogId(12345)
    await desk.send(parked(leased, nowhere))
    await desk.empty_inbox()

    assert await status(pool, parent) == "execution.failed"


async def test_what_comes_for_an_unknown_execution_is_nothing(desk: Desk, pool: Pool) -> None:
    nobody = ExecutionId(5)
    await desk.send(Due(execution_id=nobody, timer="wait:a.1#1"), Resume(execution_id=nobody))

    assert await pool.fetchval("SELECT count(*) FROM noetl.event") == 0
