"""An execution that is retried goes on with what its steps had been given, in a time of its own."""

from noetl_core.domain.events import LoopStarted
from noetl_core.domain.ids import CommandId, LoopId, StepName
from noetl_core.domain.playbook import AdmitRule, Arc, OnSuccess, Retry, StepPolicy, StepSpec
from noetl_core.domain.timers import execution_timer
from noetl_core.wire.messages import Partial, Stored
from support.running import EXECUTION, WORKER, Run, loop_over, playbook, step

STORED = Stored(tier="db", size=2, sha256=b"", inline=b"{}")


def bring(target: str, **given: str) -> Arc:
    return Arc(step=StepName(target), input=given)


def test_a_step_that_failed_is_entered_with_what_its_arc_had_brought() -> None:
    run = Run(playbook(step("a", bring("b", source="{{ event.step }}")), step("b")))
    run.done("a.1#1")
    run.fail("b.1#1")

    run.retry()

    first, second = run.entered("b")
    assert second.input == first.input == {"source": "a"}
    assert second.parent_ref == first.parent_ref is not None


def test_a_step_that_is_asked_for_is_entered_with_what_it_had() -> None:
    run = Run(playbook(step("a", bring("b", source="{{ event.step }}")), step("b")))
    run.done("a.1#1", "b.1#1")

    run.retry(step="b")

    assert run.entered("b")[-1].input == {"source": "a"}


def test_every_chunk_that_was_under_way_is_there_again() -> None:
    arc = Arc(step=StepName("b"), on="call.partial")
    run = Run(playbook(step("a", arc), step("b")))
    for number in range(2):
        run.take(
            Partial(
                execution_id=EXECUTION,
                command_id=CommandId("a.1#1"),
                worker_id=WORKER,
                chunk_index=number,
                stored=STORED,
            )
        )
    run.fail("b.1#1")

    run.retry()

    chunks = [fact.chunk for fact in run.entered("b")]
    assert chunks[2:] in (chunks[:2], chunks[1::-1])
    assert None not in chunks


def test_a_loop_that_never_began_is_not_taken_for_the_one_before() -> None:
    loop = loop_over("{{ ctx.rows | default([1, 2]) }}")
    run = Run(playbook(step("a", "b", loop=loop), step("b", "a", rows=7, join="any")))
    run.done("a.1/0#1", "a.1/1#1", "b.1#1")
    assert run.state.status == "FAILED"

    run.retry()

    assert len(run.of(LoopStarted)) == 1
    assert run.state.status == "FAILED"


def test_a_loop_that_was_skipped_begins_anew_the_next_time() -> None:
    """What a retry was to go on with is not kept for a later visit."""
    admit = StepPolicy(
        admit=(AdmitRule(when="{{ ctx.on | default(true) }}"), AdmitRule(allow=False))
    )
    looped = step("a", loop=loop_over([1]), spec=StepSpec(policy=admit))
    run = Run(playbook(step("s", "a"), looped))
    run.done("s.1#1", on=True)
    run.fail("a.1/0#1")
    run.state.ctx["on"] = False

    run.retry()

    assert run.state.redo == []


def test_the_last_item_is_the_last_of_all_and_not_of_those_that_run_again() -> None:
    pages = Retry(on_success=OnSuccess(condition="{{ not iter.last }}", max_attempts=2))
    run = Run(playbook(step("a", loop=loop_over(["x", "y"]), retry=pages)))
    run.done("a.1/1#1")
    run.fail("a.1/0#1")
    first = next(e for e in run.events if isinstance(e.fact, LoopStarted))
    run.known.undone[LoopId(first.event_id)] = [0]
    run.retry()

    run.done("a.2/0#1")

    assert run.open == ["a.2/0@2#1"]


def test_the_time_before_a_retry_does_not_end_it() -> None:
    run = Run(playbook(step("a")))
    run.due(execution_timer(0))
    run.retry()

    run.due(execution_timer(0))
    assert run.open == ["a.2#1"]

    run.due(execution_timer(1))
    assert run.open == []
    assert run.state.error is not None
    assert run.state.error.kind == "timeout"
