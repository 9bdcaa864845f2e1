"""Commands that are meant for a worker, or need one that has something."""

from typing import Any

from noetl_broker.advance import Broker
from noetl_broker.placing import WorkerWatch
from noetl_core.blob.result_store import ResultStore
from noetl_core.domain.ids import ExecutionId, RuntimeId, WorkerId
from noetl_core.domain.snowflake import Snowflake
from noetl_core.domain.workers import NOBODY, LiveWorker, Workers
from noetl_core.process.clock import unix_ms
from noetl_core.store import command, runtime
from noetl_core.store.postgres import Pool
from noetl_core.store.runtime import Registration
from noetl_core.wire.messages import Start
from services.broker.desk import Desk, done

HEAD = "apiVersion: noetl.io/v2\nkind: Playbook\nmetadata: {name: t}\nworkflow:\n"
AIMED = (
    HEAD
    + """
  - step: a
    spec: {placement: {worker: w1, wait: 60s}}
    tool: {kind: noop}
"""
)
LABELLED = (
    HEAD
    + """
  - step: a
    spec: {placement: {labels: {gpu: true}}}
    tool: {kind: noop}
"""
)
PYTHON = (
    HEAD
    + """
  - step: a
    tool: {kind: python, code: "result = 1"}
"""
)
W1, W2 = WorkerId("w1"), WorkerId("w2")


async def desk_of(pool: Pool, *workers: LiveWorker) -> Desk:
    desk = Desk(pool)
    await desk.claim()
    desk.broker = Broker(
        pool,
        ResultStore(),
        desk.states,
        held=lambda: desk.claims,
        mint=desk.mint,
        workers=lambda: Workers(workers),
    )
    return desk


def worker(name: WorkerId, *offers: str, limited: str = "") -> LiveWorker:
    return LiveWorker(
        name, frozenset({"cpu"}), frozenset(offers), limited=frozenset(limited.split())
    )


async def lease(pool: Pool, name: WorkerId, *offers: str) -> list[str]:
    rows = await command.lease(pool, name, ["cpu"], limit=9, lease_seconds=60, offers=offers)
    return [row.command_id for row in rows]


async def start(desk: Desk, content: str) -> tuple[ExecutionId, Any]:
    execution_id = ExecutionId(desk.mint())
    catalog_id = await desk.register(content)
    turn = await desk.send(
        Start(execution_id=execution_id, catalog_id=catalog_id, path="p", version=1)
    )
    return execution_id, turn


async def test_only_the_target_may_take_it_and_only_the_target_is_told(pool: Pool) -> None:
    desk = await desk_of(pool)
    execution_id, turn = await start(desk, AIMED)

    assert dict(turn.work) == {}
    assert [(name, count) for (_, name), count in turn.meant_for.items()] == [(W1, 1)]
    assert await lease(pool, W2) == []
    assert await lease(pool, W1) == ["a.1#1"]
    context = await pool.fetchval(
        "SELECT context::text FROM noetl.event"
        " WHERE execution_id = $1 AND event_type = 'command.issued'",
        execution_id,
    )
    assert '"target_worker": "w1"' in context


async def test_when_its_time_is_over_anyone_in_the_pool_takes_it(pool: Pool) -> None:
    desk = await desk_of(pool)
    await start(desk, AIMED)
    await pool.execute("UPDATE noetl.command SET target_until = now()")

    assert await lease(pool, W2) == ["a.1#1"]


async def test_what_its_target_has_lost_is_for_anyone_at_once(pool: Pool) -> None:
    desk = await desk_of(pool)
    await start(desk, AIMED)
    (key,) = await lease(pool, W1)
    await desk.lose(key)  # type: ignore[arg-type]

    assert await lease(pool, W2) == ["a.1#2"]


async def test_a_labelled_command_wakes_a_worker_that_has_the_label(pool: Pool) -> None:
    desk = await desk_of(pool, worker(W1), worker(W2, "gpu=true"))
    _, turn = await start(desk, LABELLED)

    assert [name for _, name in turn.meant_for] == [W2]
    assert turn.nobody_able == set()
    assert await lease(pool, W1, "tool:noop") == []
    assert await lease(pool, W2, "gpu=true") == ["a.1#1"]


async def test_where_nobody_has_the_label_it_waits_and_that_is_said(pool: Pool) -> None:
    desk = await desk_of(pool, worker(W1))
    _, turn = await start(desk, LABELLED)

    assert turn.nobody_able == {("cpu", frozenset({"gpu=true"}))}
    assert await lease(pool, W1) == []


async def test_rows_of_a_limited_tool_say_so_and_others_cost_nothing(pool: Pool) -> None:
    free = await desk_of(pool, worker(W1, "tool:python"))
    _, turn = await start(free, PYTHON)
    assert turn.batch.placements == []
    limiting = await desk_of(pool, worker(W1, "tool:python", limited="python"))
    limiting.claims = free.claims
    _, turn = await start(limiting, PYTHON)

    assert [row.requires for row in turn.batch.placements] == ["tool:python"]


async def test_the_watch_sees_who_lives_and_what_they_offer(pool: Pool) -> None:
    async with pool.acquire() as conn, conn.transaction():
        for name, labels in (
            ("node.1", {"pool": "cpu,gpu", "gpu": "true", "tool_slots": "python=2"}),
            ("gone", {"pool": "cpu"}),
        ):
            await runtime.register(
                conn,
                Registration(
                    name=name, kind="worker", labels=labels, capabilities=["noop"], capacity=8
                ),
                lambda node: Snowflake(node, unix_ms).mint(),
            )
    gone = await pool.fetchval("SELECT runtime_id FROM noetl.runtime WHERE name = 'gone'")
    await runtime.mark_offline(pool, [RuntimeId(gone)])
    watch = WorkerWatch(pool)
    assert watch.seen is NOBODY

    await watch.look()

    (found,) = watch.seen.able("gpu", frozenset({"gpu=true", "tool:noop"}))
    assert found.worker_id == "node-1"
    assert found.capacity == 8
    assert watch.seen.limited == {"python"}
    assert watch.seen.able("other", frozenset()) == []


async def test_a_result_that_comes_after_its_lease_was_given_up_is_refused(pool: Pool) -> None:
    desk = await desk_of(pool)
    execution_id, _ = await start(desk, AIMED)
    (late,) = await lease(pool, W1)
    await desk.lose(late)  # type: ignore[arg-type]
    (again,) = await lease(pool, W2)
    await desk.send(done(execution_id, again, 2, W2))  # type: ignore[arg-type]
    recorded = await desk.types(execution_id)

    await desk.send(done(execution_id, late, 1, W1))  # type: ignore[arg-type]
    await desk.send(done(execution_id, again, 2, W2))  # type: ignore[arg-type]

    assert await desk.types(execution_id) == recorded
    rows = await pool.fetch("SELECT actor, action, subject FROM noetl.audit")
    assert [tuple(row) for row in rows] == [("w1", "completion.refused", "a.1#1")]
