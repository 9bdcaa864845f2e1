"""What waits without a worker, and what people tell an execution: signals, pauses, retries."""

from typing import Any

import msgspec

from noetl_core.domain.envelope import Envelope, Reference
from noetl_core.domain.errors import ToolError
from noetl_core.domain.events import (
    CallDone,
    CallFailed,
    CommandParked,
    Event,
    ExecutionFailed,
    FanoutStarted,
    LoopDone,
    LoopStarted,
    SignalReceived,
    StepAborted,
    StepSkipped,
)
from noetl_core.domain.fold import fold
from noetl_core.domain.ids import (
    CatalogId,
    CommandId,
    EventId,
    ExecutionId,
    LoopId,
    RefId,
    StepName,
)
from noetl_core.domain.playbook import (
    AdmitRule,
    Arc,
    Executor,
    ExecutorSpec,
    StepPolicy,
    StepSpec,
)
from noetl_core.domain.state import ExecutionState
from noetl_core.wire.messages import ChildEnded, Fork, Parent, Partial, Pause, Resume, Start, Stored
from support.running import EXECUTION, FAILED, WORKER, Run, arc, loop_over, playbook, step

CATALOG = CatalogId(7)
STORED = Stored(tier="db", size=2, sha256=b"", inline=b"{}")


def calling(**how: Any) -> Run:
    run = Run(
        playbook(step("a", arc("b"), arc("c", FAILED), kind="playbook"), step("b"), step("c"))
    )
    run.park("a.1#1", "playbook", catalog_id=CATALOG, path="child", **how)
    return run


def child_of(run: Run) -> ExecutionId:
    child = run.of(CommandParked)[-1].child
    assert child is not None
    return child


def end_child(run: Run, status: Any = "COMPLETED", **how: Any) -> None:
    run.take(
        ChildEnded(
            execution_id=EXECUTION,
            command_id=CommandId("a.1#1"),
            child_id=child_of(run),
            status=status,
            **how,
        )
    )


def test_a_parked_command_is_open_and_goes_nowhere_by_itself() -> None:
    run = calling()

    assert run.open == ["a.1#1"]
    run.expire("a.1#1")
    run.done("a.1#1")
    assert run.open == ["a.1#1"]


def test_a_child_is_called_by_the_id_of_the_event_that_says_so() -> None:
    run = calling()

    parked = next(e for e in run.events if isinstance(e.fact, CommandParked))
    assert int(child_of(run)) == parked.event_id


def test_the_end_of_a_child_ends_the_call_with_its_result() -> None:
    run = calling()
    reference = Reference(ref_id=RefId(5), type="db")
    end_child(run, result=Envelope(status="ok", reference=reference))

    done = run.of(CallDone)[0]
    assert done.result.reference is not None
    assert done.result.reference.execution_id == child_of(run)
    assert done.result.context["execution_id"] == str(child_of(run))
    assert run.open == ["b.1#1"]


def test_a_child_that_fails_fails_the_call() -> None:
    run = calling()
    end_child(run, "FAILED", error=ToolError(kind="x", message="no luck"))

    failed = run.of(CallFailed)[0]
    assert failed.error.kind == "playbook_failed"
    assert "no luck" in failed.error.message
    assert run.open == ["c.1#1"]


def test_the_end_of_somebody_elses_child_is_nothing() -> None:
    run = calling()
    run.take(
        ChildEnded(
            execution_id=EXECUTION,
            command_id=CommandId("a.1#1"),
            child_id=ExecutionId(999_999),
            status="COMPLETED",
        )
    )

    assert run.open == ["a.1#1"]


def test_playbooks_do_not_call_each_other_without_end() -> None:
    parent = Parent(execution_id=ExecutionId(9), command_id=CommandId("x.1#1"), depth=32)
    start = Start(execution_id=EXECUTION, catalog_id=CATALOG, path="p", version=1, parent=parent)
    run = Run(playbook(step("a", kind="playbook")), start)

    run.park("a.1#1", "playbook", catalog_id=CATALOG, path="p")

    assert run.state.error is not None
    assert run.state.error.kind == "depth_limit"


def test_children_of_an_execution_that_ends_are_orphans() -> None:
    run = calling()
    run.cancel()

    assert run.state.orphans == [child_of(run)]


def two_children(*steps: str) -> Run:
    """Steps that were entered in this order, each of which waits for a child."""
    run = Run(
        playbook(step("begin", *steps, inclusive=True), *(step(n, kind="playbook") for n in steps))
    )
    run.done("begin.1#1")
    for name in steps:
        run.park(f"{name}.1#1", "playbook", catalog_id=CATALOG, path="child")
    return run


def test_orphans_are_the_same_for_a_state_that_came_back_from_the_database() -> None:
    run = two_children("later", "a")
    returned = msgspec.convert(as_jsonb(msgspec.to_builtins(run.state)), ExecutionState)
    assert list(returned.commands) != list(run.state.commands), "this shows nothing"

    run.cancel()

    assert len(run.state.orphans) == 2
    assert fold(returned, run.events[-1]) == run.state


def test_orphans_of_a_step_that_is_given_up_are_in_the_order_of_its_event() -> None:
    run = two_children("b", "a")
    first, second = (parked.child for parked in run.of(CommandParked))
    given_up = StepAborted(
        step=StepName("b"),
        visit=1,
        error=ToolError(kind="timeout", message="too late"),
        commands=(CommandId("a.1#1"), CommandId("b.1#1")),
    )

    fold(run.state, Event(execution_id=EXECUTION, event_id=EventId(10_000), fact=given_up))

    assert run.state.orphans == [second, first]


def as_jsonb(value: Any) -> Any:
    """With its keys as Postgres keeps them: the shorter first, then by their bytes."""
    if isinstance(value, dict):
        return {k: as_jsonb(value[k]) for k in sorted(value, key=lambda k: (len(k), k.encode()))}
    return value


def test_a_child_that_takes_too_long_is_an_orphan_and_its_call_has_failed() -> None:
    run = calling(until_ms=5)
    run.due("wait:a.1#1")

    assert run.state.orphans == [child_of(run)]
    assert run.open == ["c.1#1"]


def waiting(**how: Any) -> Run:
    run = Run(playbook(step("a", "b", kind="wait"), step("b")))
    run.park("a.1#1", "wait", **how)
    return run


def test_a_wait_is_over_when_its_timer_runs_out() -> None:
    run = waiting(until_ms=5)
    run.due("wait:a.1#1")

    assert run.open == ["b.1#1"]


def test_a_timer_that_comes_again_changes_nothing() -> None:
    run = waiting(until_ms=5)
    run.due("wait:a.1#1")
    before = len(run.events)
    run.due("wait:a.1#1")

    assert len(run.events) == before


def test_a_signal_ends_the_wait_for_its_name() -> None:
    run = waiting(signal="go")
    run.signal("stop", 1)
    assert run.open == ["a.1#1"]

    run.signal("go", 2, data=STORED)

    assert run.of(CallDone)[0].signal_id == 2
    assert run.open == ["b.1#1"]


def test_a_signal_that_comes_before_its_wait_is_kept() -> None:
    run = Run(playbook(step("a", "b", kind="wait"), step("b")))
    run.signal("go")
    run.park("a.1#1", "wait", signal="go")

    assert run.open == ["b.1#1"]
    assert run.state.signals == []


def test_one_signal_ends_one_wait() -> None:
    loop = loop_over([1, 2])
    run = Run(playbook(step("a", loop=loop, kind="wait")))
    run.park("a.1/0#1", "wait", signal="go")
    run.park("a.1/1#1", "wait", signal="go")

    run.signal("go", 1)
    run.signal("go", 1)

    assert run.open == ["a.1/1#1"]
    assert len(run.of(SignalReceived)) == 1


def test_an_approval_counts_from_those_who_may_give_it() -> None:
    run = Run(playbook(step("a", "b", kind="approval"), step("b")))
    run.park("a.1#1", "approval", signal="a", details={"approvers": ["ann"]})
    run.signal("a", 1, by="bob")
    assert run.open == ["a.1#1"]

    run.signal("a", 2, by="ann")
    assert run.open == ["b.1#1"]


def test_a_denied_approval_fails_the_step() -> None:
    run = Run(playbook(step("a", kind="approval")))
    run.park("a.1#1", "approval", signal="a")
    run.signal("a", approved=False, by="ann")

    assert run.state.error is not None
    assert (run.state.error.kind, "ann" in run.state.error.message) == ("denied", True)


def test_a_step_out_of_time_drops_what_is_under_way() -> None:
    run = Run(playbook(step("a", arc("b", FAILED), loop=loop_over([1, 2, 3])), step("b")))
    run.done("a.1/0#1")
    run.due("step:a.1")

    assert run.of(StepAborted)[0].commands == ("a.1/1#1", "a.1/2#1")
    assert run.open == ["b.1#1"]
    run.done("a.1/1#1")
    assert run.open == ["b.1#1"]


def test_an_execution_out_of_time_has_failed() -> None:
    run = Run(playbook(step("a")))
    run.due("execution")

    assert run.of(ExecutionFailed)[0].error.kind == "timeout"
    assert not run.open


def test_a_paused_execution_still_decides_and_can_be_resumed() -> None:
    run = Run(playbook(step("a", "b"), step("b")))
    run.take(Pause(execution_id=EXECUTION))
    run.take(Pause(execution_id=EXECUTION))
    run.done("a.1#1")
    assert (run.state.status, run.open) == ("PAUSED", ["b.1#1"])

    run.take(Resume(execution_id=EXECUTION))
    run.done("b.1#1")
    assert run.state.status == "COMPLETED"


def test_a_retry_enters_the_failed_step_and_what_was_under_way_beside_it() -> None:
    run = Run(
        playbook(
            step("s", "a", "b", inclusive=True, router=True),
            step("a", "j"),
            step("b", "j"),
            step("j"),
        )
    )
    run.fail("a.1#1")
    assert not run.open

    run.retry()
    assert sorted(run.open) == ["a.2#1", "b.2#1"]

    run.done("a.2#1", "b.2#1", "j.1#1")
    assert run.state.status == "COMPLETED"
    assert run.state.generation == 1


def test_tokens_that_waited_at_a_barrier_wait_there_again() -> None:
    run = Run(
        playbook(
            step("s", "a", "b", inclusive=True, router=True),
            step("a", "j"),
            step("b", "j"),
            step("j"),
        )
    )
    run.done("a.1#1")
    run.fail("b.1#1")
    run.retry()
    assert run.open == ["b.2#1"]

    run.done("b.2#1")
    assert [fact.tokens for fact in run.entered("j")] == [2]


def test_only_what_a_loop_left_undone_is_run_again() -> None:
    run = Run(playbook(step("a", loop=loop_over(["x", "y", "z"]))))
    run.done("a.1/0#1")
    run.fail("a.1/1#1")
    run.done("a.1/2#1")
    first = next(e for e in run.events if isinstance(e.fact, LoopStarted))
    run.known.undone[LoopId(first.event_id)] = [1]

    run.retry()
    assert run.open == ["a.2/1#1"]

    run.done("a.2/1#1")
    again, end = run.of(LoopStarted)[-1], run.of(LoopDone)[-1]
    assert {again.base, again.collection_id} == {LoopId(first.event_id)}
    assert (end.total, end.done, end.failed, end.status) == (3, 3, 0, "ok")
    assert run.state.status == "COMPLETED"


def test_a_retry_can_run_every_item_again() -> None:
    run = Run(playbook(step("a", loop=loop_over(["x", "y"]))))
    run.done("a.1/0#1")
    run.fail("a.1/1#1")

    run.retry(items="all")

    assert run.open == ["a.2/0#1", "a.2/1#1"]
    assert run.of(FanoutStarted) == []


def test_an_execution_that_went_well_is_retried_from_a_step_only() -> None:
    run = Run(playbook(step("a", "b"), step("b")))
    run.done("a.1#1", "b.1#1")

    run.retry()
    assert run.state.status == "COMPLETED"

    run.retry(step=StepName("b"))
    assert run.open == ["b.2#1"]


def test_a_step_that_is_not_admitted_is_skipped_and_its_token_goes_on() -> None:
    rules = (AdmitRule(when="{{ workload.on }}"), AdmitRule(allow=False))
    spec = StepSpec(policy=StepPolicy(admit=rules))

    skipped = Run(playbook(step("a", "b", spec=spec), step("b"), on=False))
    admitted = Run(playbook(step("a", "b", spec=spec), step("b"), on=True))

    assert (skipped.open, len(skipped.of(StepSkipped))) == (["b.1#1"], 1)
    assert skipped.state.steps[StepName("a")].status == "SKIPPED"
    assert admitted.open == ["a.1#1"]


def test_the_final_step_runs_once_when_nothing_else_is_left() -> None:
    book = playbook(step("a"), step("z"))
    book = type(book)(
        metadata=book.metadata,
        steps=book.steps,
        executor=Executor(spec=ExecutorSpec(final_step="z")),
    )
    run = Run(book)
    run.done("a.1#1")
    assert run.open == ["z.1#1"]

    run.done("z.1#1")
    assert run.state.status == "COMPLETED"


def test_what_an_arc_brings_along_is_there_for_the_loop_it_leads_to() -> None:
    bring = Arc(step=StepName("b"), input={"rows": "{{ output.data.rows }}"})
    run = Run(playbook(step("a", bring), step("b", loop=loop_over("{{ rows }}"))))
    run.done("a.1#1", value={"rows": [1, 2]})

    assert run.open == ["b.1/0#1", "b.1/1#1"]
    assert run.entered("b")[0].input == {"rows": [1, 2]}


def stream(run: Run, index: int) -> None:
    run.take(
        Partial(
            execution_id=EXECUTION,
            command_id=CommandId("a.1#1"),
            worker_id=WORKER,
            chunk_index=index,
            stored=STORED,
        ),
        value={"rows": [index]},
    )


def test_every_chunk_sends_a_token_and_the_end_takes_the_other_arcs() -> None:
    each = Arc(step=StepName("b"), on="call.partial")
    run = Run(playbook(step("a", each, "c"), step("b"), step("c")))
    stream(run, 0)
    stream(run, 1)
    stream(run, 1)
    assert run.open == ["a.1#1", "b.1#1", "b.2#1"]

    run.done("a.1#1")
    assert run.open == ["b.1#1", "b.2#1", "c.1#1"]
    assert [f.chunk is not None for f in run.entered("b")] == [True, True]


def test_to_a_step_that_a_chunk_leads_to_its_source_is_that_chunk() -> None:
    each = Arc(step=StepName("b"), on="call.partial")
    loop = loop_over("{{ a.rows }}")
    run = Run(playbook(step("a", each), step("b", loop=loop)))
    stream(run, 0)
    stream(run, 1)

    assert [fact.total for fact in run.of(LoopStarted)] == [1, 1]
    assert sorted(str(part) for part in run.known.parts.values()) == ["[0]", "[1]"]


def test_chunks_that_another_attempt_has_sent_are_there_already() -> None:
    each = Arc(step=StepName("b"), on="call.partial")
    run = Run(playbook(step("a", each), step("b")))
    stream(run, 0)
    run.expire("a.1#1")

    assert run.state.commands[CommandId("a.1#2")].chunks == 1


def test_a_fork_begins_where_it_is_told_with_what_was_true_there() -> None:
    result = Envelope(
        status="ok", reference=Reference(ref_id=RefId(5), type="db", execution_id=ExecutionId(9))
    )
    fork = Fork(
        origin=ExecutionId(9),
        entry=StepName("b"),
        ctx={"n": 1},
        steps={StepName("a"): result},
        input={"row": 2},
    )
    start = Start(execution_id=EXECUTION, catalog_id=CATALOG, path="p", version=1, fork=fork)
    run = Run(playbook(step("a", "b"), step("b")), start)

    assert run.open == ["b.1#1"]
    assert run.entered("b")[0].input == {"row": 2}
    assert run.state.ctx == {"n": 1}
    assert run.state.steps[StepName("a")].result == result
