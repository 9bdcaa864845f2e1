"""Waiting on real services: for children, signals, approvals, time; and it holds nothing."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.flow import Flow


async def test_a_pool_with_one_slot_runs_a_parent_of_ten_children(flow: Flow) -> None:
    with worker_with_one_slot(flow):
        execution = await flow.run("one_slot_parent")

    assert execution.count("command.parked", step="call") == 10
    children = await flow.children(execution.execution_id)
    assert len(children) == 10
    assert (await flow.child(children[0])).entered() == ["square", "last"]
    squares = [number * number for number in range(10)]
    assert execution.result("call") == squares, "what `return_step` returned, not the last step"
    assert execution.result("total") == sum(squares)


async def test_items_of_a_child_see_the_item_of_their_parent(flow: Flow) -> None:
    execution = await flow.run("nested_outer")

    assert execution.result("table") == [["a1", "a2"], ["b1", "b2"], ["c1", "c2"]]
    assert len(await flow.children(execution.execution_id)) == 3


async def test_who_cancels_a_parent_cancels_the_tree_below_it(flow: Flow) -> None:
    parent = await flow.start("waiting_parent")
    tree = await until_all_wait(flow, parent)
    await flow.cancel(parent)
    await flow.ended(parent, "CANCELLED")

    assert len(tree) == 4, "two children with one grandchild each"
    statuses = [(await flow.child(execution_id)).view["status"] for execution_id in tree]
    assert statuses == ["CANCELLED"] * 4


async def test_time_a_signal_and_an_approval_are_waited_for(flow: Flow) -> None:
    execution_id = await flow.start("waiting")
    await flow.until(execution_id, "command.parked", step="listen")
    await flow.signal(execution_id, "news", data={"text": "rain"})
    await flow.until(execution_id, "command.parked", step="ask")
    await flow.signal(execution_id, "ask", by="ann", data={"reason": "the garden"})
    execution = await flow.ended(execution_id)

    assert execution.entered() == ["pause", "listen", "ask", "agreed"]
    (began,), (ended,) = (
        execution.of("step.enter", step="pause"),
        execution.of("step.exit", step="pause"),
    )
    assert ended.at - began.at >= 0.3
    (question,) = execution.of("command.parked", step="ask")
    assert question.context["details"]["message"] == "Is rain good news?"
    assert execution.result("agreed") == "the garden"


async def test_an_approval_that_is_refused_can_be_handled(flow: Flow) -> None:
    execution_id = await flow.start("waiting")
    await flow.signal(execution_id, "news", data={"text": "snow"})
    await flow.until(execution_id, "command.parked", step="ask")
    await flow.signal(execution_id, "ask", by="ann", approved=False)
    execution = await flow.ended(execution_id)

    assert execution.entered() == ["pause", "listen", "ask", "refused"]


async def test_only_who_may_can_approve(flow: Flow) -> None:
    execution_id = await flow.start("waiting")
    await flow.signal(execution_id, "news", data={"text": "hail"})
    await flow.until(execution_id, "command.parked", step="ask")
    await flow.stack.client.post(
        f"/api/executions/{execution_id}/signal", json={"name": "ask", "by": "eve"}
    )
    await flow.signal(execution_id, "ask", by="ann", data={"reason": "ann"})
    execution = await flow.ended(execution_id)

    assert execution.result("agreed") == "ann"


async def test_a_loop_that_is_out_of_time_is_stopped_and_the_failure_handled(flow: Flow) -> None:
    execution = await flow.run("late_loop")

    assert execution.entered() == ["each", "apologise"]
    assert execution.count("step.aborted", step="each") == 1
    assert 0 < execution.count("call.done", step="each") < 50
    assert execution.result("apologise") == "timeout"


async def test_a_loop_that_is_out_of_time_fails_the_execution(flow: Flow) -> None:
    execution = await flow.run("late_loop", handled=False, ends="FAILED")

    assert execution.view["error"]["kind"] == "timeout"


async def test_an_execution_that_is_out_of_time_fails_with_all_it_was_doing(flow: Flow) -> None:
    begun = time.monotonic()
    execution = await flow.run("late_execution", ends="FAILED", seconds=25.0)

    assert time.monotonic() - begun < 25.0  # without its end it would work for half a minute
    assert execution.view["error"]["kind"] == "timeout"


# -- given -----------------------------------------------------------------------------------------


@contextmanager
def worker_with_one_slot(flow: Flow) -> Iterator[None]:
    """The only worker of the pool `single`."""
    stack = flow.stack
    environment = {
        **os.environ,
        "NOETL_POSTGRES_DSN": stack.info["dsn"],
        "NOETL_NATS_URL": stack.info["nats_url"],
        "NOETL_STORE_DIR": str(Path(stack.data_dir) / "store"),
        "NOETL_WORKER_POOL": "single",
        "NOETL_WORKER_SLOTS": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "noetl_worker"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=120)


async def until_all_wait(flow: Flow, parent: int) -> list[int]:
    """The tree of a `waiting_parent` when its leaves are asleep."""
    await flow.until(parent, "command.parked", step="call")
    deadline = time.monotonic() + 60
    while True:
        tree = await flow.children(parent)
        rows = await flow.stack.query(
            "SELECT execution_id FROM noetl.timer WHERE execution_id = ANY($1)", tree
        )
        if len(rows) == 2:
            return tree
        assert time.monotonic() < deadline, tree
