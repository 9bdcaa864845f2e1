"""Fan-out, cursors and chunks: loops whose items are not simply counted through."""

from typing import Any

from noetl_core.domain.events import (
    CommandIssued,
    FaninCompleted,
    FanoutStarted,
    LoopDone,
    LoopStarted,
    ShardDone,
    ShardEnqueued,
    ShardFailed,
)
from noetl_core.domain.playbook import Cursor, Fanout, Loop, LoopSpec, StepSpec
from support.running import Run, arc, fan_out, playbook, step

PARTIAL = "{{ fanin.status == 'partial' }}"
COMPLETE = "{{ fanin.status == 'complete' }}"
NONE = "{{ fanin.status == 'failed' }}"


def fanning(count: int, *, max_in_flight: int = 500, **rules: Any) -> Run:
    arcs = (arc("good", COMPLETE), arc("some", PARTIAL), arc("none", NONE))
    spread = step(
        "a",
        *arcs,
        loop=fan_out(list(range(count)), max_in_flight=max_in_flight),
        spec=StepSpec(fanout=Fanout(**rules)),
    )
    ends = [step(name, router=True) for name in ("good", "some", "none")]
    return Run(playbook(spread, *ends))


def went_to(run: Run) -> set[str]:
    return {str(name) for name in run.state.steps} - {"a"}


def test_every_item_is_announced_issued_and_ended_under_its_own_name() -> None:
    run = fanning(2)
    run.done("a.1/0#1", "a.1/1#1")

    assert run.said[2:] == [
        "loop.fanout.started a.1",
        "loop.shard.enqueued a.1",
        "command.issued a.1/0#1",
        "loop.shard.enqueued a.1",
        "command.issued a.1/1#1",
        "loop.shard.done a.1/0#1",
        "loop.shard.done a.1/1#1",
        "loop.fanin.completed a.1",
        "step.exit a.1",
        "step.enter good.1",
        "step.exit good.1",
        "execution.completed",
    ]


def test_a_fan_out_is_issued_in_windows() -> None:
    run = fanning(5, max_in_flight=2)
    assert run.open == ["a.1/0#1", "a.1/1#1"]

    run.done("a.1/0#1")
    assert run.open == ["a.1/1#1", "a.1/2#1"]
    assert [fact.iter_index for fact in run.of(ShardEnqueued)] == [0, 1, 2]


def test_some_failures_make_it_partial() -> None:
    run = fanning(10, max_shard_retries=0)
    run.fail("a.1/3#1", "a.1/7#1")
    run.done(*(f"a.1/{n}#1" for n in range(10) if n not in {3, 7}))

    end = run.of(FaninCompleted)[0]
    assert (end.fanin, end.total, end.done, end.failed, end.status) == ("partial", 10, 8, 2, "ok")
    assert went_to(run) == {"some"}


def test_a_shard_that_fails_is_tried_again_by_itself() -> None:
    run = fanning(3, max_shard_retries=2)
    run.fail("a.1/0#1", "a.1/2#1")
    assert not run.of(ShardFailed)

    run.done("a.1/1#1", "a.1/0#2", "a.1/2#2")

    assert run.of(FaninCompleted)[0].fanin == "complete"
    assert len(run.of(ShardDone)) == 3
    assert len(run.of(ShardEnqueued)) == 3


def test_a_shard_without_attempts_left_has_failed() -> None:
    run = fanning(2, max_shard_retries=1)
    run.fail("a.1/0#1", "a.1/0#2")
    run.done("a.1/1#1")

    assert [fact.iter_index for fact in run.of(ShardFailed)] == [0]
    assert went_to(run) == {"some"}


def test_nothing_but_failures_is_a_failure_and_can_be_handled() -> None:
    run = fanning(2, max_shard_retries=0)
    run.fail("a.1/0#1", "a.1/1#1")

    assert run.state.steps["a"].status == "FAILED"  # type: ignore[index]
    assert went_to(run) == {"none"}
    assert run.state.status == "COMPLETED"


def test_where_a_part_is_not_enough_one_failure_is_a_failure() -> None:
    run = fanning(2, max_shard_retries=0, allow_partial=False)
    run.fail("a.1/0#1")
    run.done("a.1/1#1")

    assert went_to(run) == {"none"}


def test_failing_fast_hands_out_nothing_more() -> None:
    run = fanning(5, max_in_flight=2, max_shard_retries=0, fail_fast=True)
    run.fail("a.1/0#1")
    assert run.open == ["a.1/1#1"]

    run.done("a.1/1#1")
    assert run.of(FaninCompleted)[0].fanin == "failed"


def test_an_empty_fan_out_is_complete_at_once() -> None:
    assert went_to(fanning(0)) == {"good"}


def test_a_fan_out_remembers_what_it_may_do() -> None:
    started = fanning(3, max_shard_retries=4, allow_partial=False).of(FanoutStarted)[0]

    assert (started.total, started.shard_retries_max, started.allow_partial) == (3, 4, False)


def test_chunks_hand_several_items_to_one_command() -> None:
    loop = Loop(collection=[1, 2, 3, 4, 5], spec=LoopSpec(chunk_size=2))
    run = Run(playbook(step("a", loop=loop)))

    assert run.of(LoopStarted)[0].total == 3
    assert next(iter(run.known.parts.values())) == [[1, 2], [3, 4], [5]]


def claiming(slots: int = 2) -> Run:
    loop = Loop(cursor=Cursor(claim="x"), spec=LoopSpec(mode="cursor", max_in_flight=slots))
    return Run(playbook(step("a", loop=loop)))


def test_a_cursor_claims_in_every_slot_until_each_has_found_nothing() -> None:
    run = claiming()
    assert run.open == ["a.1/0#1", "a.1/1#1"]

    run.done("a.1/0#1", frame_rows=50)
    assert run.open == ["a.1/1#1", "a.1/2#1"]

    run.done("a.1/1#1", frame_rows=0)
    assert run.open == ["a.1/2#1"]

    run.done("a.1/2#1", frame_rows=3)
    run.done("a.1/3#1", frame_rows=0)
    end = run.of(LoopDone)[0]
    assert (end.total, end.done, end.failed, end.status) == (2, 2, 0, "ok")
    assert run.state.status == "COMPLETED"


def test_a_frame_that_fails_ends_the_loop() -> None:
    run = claiming()
    run.fail("a.1/0#1")
    assert run.open == ["a.1/1#1"]

    run.done("a.1/1#1", frame_rows=1)
    assert run.state.status == "FAILED"


def test_a_retried_item_is_announced_once() -> None:
    run = fanning(1, max_shard_retries=2)
    run.fail("a.1/0#1")

    assert len(run.of(ShardEnqueued)) == 1
    assert len(run.of(CommandIssued)) == 2
