"""Loops on real services: order, windows, chunks, rounds, branches, and collections of any kind."""

import pytest

from support.flow import Flow, most_at_once, why

LETTERS = ["a", "b", "c", "d", "e", "f", "g"]


async def test_items_of_a_sequential_loop_run_one_after_the_other_in_order(flow: Flow) -> None:
    execution = await flow.run("order")

    done = [event.iter_index for event in execution.of("call.done", step="sequential")]
    assert done == list(range(7))
    events = execution.of("command.issued", "call.done", step="sequential")
    assert [e.event_type for e in events] == ["command.issued", "call.done"] * 7
    assert most_at_once(execution.spans("sequential")) == 1


async def test_items_of_a_parallel_loop_overlap_within_the_window(flow: Flow) -> None:
    execution = await flow.run("order")

    in_flight, most = 0, 0
    for event in execution.of("command.issued", "call.done", step="parallel"):
        in_flight += 1 if event.event_type == "command.issued" else -1
        most = max(most, in_flight)
    assert most == 3
    assert most_at_once(execution.spans("parallel")) > 1
    assert [result["stdout"] for result in execution.result("parallel")] == LETTERS


async def test_a_chunk_of_items_goes_to_one_command(flow: Flow) -> None:
    execution = await flow.run("order")

    assert execution.result("chunked") == ["abc", "def", "g"]
    assert execution.count("command.issued", step="chunked") == 3


async def test_a_loop_that_is_entered_again_starts_anew_each_time(flow: Flow) -> None:
    execution = await flow.run("loop_again")

    assert [e.context["total"] for e in execution.of("loop.started")] == [1, 2, 3, 4]
    assert execution.count("loop.done") == 4
    assert execution.count("call.done", step="each") == 1 + 2 + 3 + 4
    assert execution.result("finish") == [40, 41, 42, 43]


async def test_a_loop_is_live_in_two_branches_at_the_same_time(flow: Flow) -> None:
    execution = await flow.run("two_branches")

    assert sorted(execution.entered()) == sorted(
        ["begin", "left", "right", "each", "each", "after", "after"]
    )
    first, second = (e.event_id for e in execution.of("loop.started"))
    loops = [event.loop_id for event in execution.of("call.done", step="each")]
    assert sorted(loops.count(loop_id) for loop_id in (first, second)) == [5, 5]
    ends = execution.of("loop.done")
    assert {event.loop_id for event in ends} == {first, second}
    assert execution.of("loop.started")[-1].event_id < ends[0].event_id, "they never overlapped"
    assert set(await flow.results(execution, "each")) == {
        f"{side} {number}" for side in ("left", "right") for number in range(5)
    }


async def test_twenty_items_that_end_at_once_end_the_loop_once(flow: Flow) -> None:
    for _ in range(3):
        execution = await flow.run("all_at_once")
        ended = [event.at for event in execution.of("call.done", step="each")]
        if max(ended) - min(ended) < 1.0:
            break  # A machine that others use spreads one of three, not each.

    assert len(ended) == 20
    assert max(ended) - min(ended) < 1.0, "they did not end at the same time"
    assert execution.count("loop.done") == 1
    assert execution.count("command.issued", step="after") == 1
    assert execution.result("after") == {"total": 20, "success": 20, "failed": 0}


async def test_a_loop_over_nothing_is_done_at_once(flow: Flow) -> None:
    execution = await flow.run("collections", items=[])

    assert execution.entered() == ["each", "after"]
    assert execution.count("command.issued", step="each") == 0
    assert execution.count("loop.started", "loop.done") == 2
    expected = {"results": [], "stats": {"total": 0, "success": 0, "failed": 0}}
    assert execution.result("after") == expected


@pytest.mark.parametrize(
    ("items", "kind"),
    [("abc", "str"), ({"a": 1}, "dict"), (5, "int"), (None, "NoneType"), (True, "bool")],
)
async def test_a_loop_over_what_is_no_list_fails_and_says_what_it_is(
    flow: Flow, items: object, kind: str
) -> None:
    execution = await flow.run("collections", items=items, ends="FAILED")

    assert execution.count("loop.started", "command.issued") == 0
    assert kind in str(execution.view["error"]), why(execution)


async def test_every_row_of_a_work_queue_is_worked_on_once(flow: Flow) -> None:
    execution = await flow.run("work_queue")

    rows = await flow.stack.query(
        "SELECT id, runs FROM work_queue WHERE execution_id = $1 ORDER BY id",
        str(execution.execution_id),
    )
    assert [(row["id"], row["runs"]) for row in rows] == [(n, 1) for n in range(1, 201)]
    frames = execution.of("call.done", step="work")
    claimed = [event.context.get("frame_rows", 0) for event in frames]
    assert sum(claimed) == 200
    assert claimed.count(0) == 4, "each slot ends with a claim that finds nothing"
    assert execution.count("loop.done") == 1
