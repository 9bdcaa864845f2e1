"""fold: what is true after an event."""

import msgspec
import pytest

from noetl_core.domain.errors import ToolError
from noetl_core.domain.events import CallDone, CommandExpired, CommandIssued, Event
from noetl_core.domain.fold import fold
from noetl_core.domain.ids import CommandId, EventId, StepName
from noetl_core.domain.state import ExecutionState
from support.running import EXECUTION, FAILED, Run, arc, loop_over, playbook, step

_encode = msgspec.json.Encoder(order="deterministic").encode


def refolded(run: Run) -> ExecutionState:
    state = ExecutionState(execution_id=run.state.execution_id)
    for event in run.events:
        fold(state, event)
    return state


def three_items(**how: int | bool) -> Run:
    return Run(playbook(step("a", loop=loop_over([1, 2, 3], **how))))  # type: ignore[arg-type]


def test_folding_the_log_again_gives_the_same_state() -> None:
    run = three_items()
    run.done("a.1/1#1", total=1)

    assert _encode(refolded(run)) == _encode(run.state)


def test_an_event_that_comes_again_changes_nothing() -> None:
    run = three_items()
    run.done("a.1/1#1")
    before = _encode(run.state)

    for event in run.events:
        fold(run.state, event)

    assert _encode(run.state) == before


def test_an_open_command_is_known_with_its_place_until_it_ends() -> None:
    run = three_items(max_in_flight=2)

    assert run.open == ["a.1/0#1", "a.1/1#1"]

    run.done("a.1/0#1")
    assert run.open == ["a.1/1#1", "a.1/2#1"]


def test_a_claim_names_the_worker() -> None:
    run = three_items()
    run.claim("a.1/0#1")

    assert [command.worker_id for command in run.state.commands.values()] == ["w1", None, None]


def test_a_loop_counts_what_ended_and_what_is_open() -> None:
    run = Run(playbook(step("a", loop=loop_over([1, 2, 3, 4], max_in_flight=3), best_effort=True)))
    run.done("a.1/0#1")
    run.fail("a.1/1#1")

    loop = run.state.visits["a.1"].loop  # type: ignore[index]
    assert loop is not None
    assert (loop.done, loop.failed, loop.in_flight, loop.next_index) == (1, 1, 2, 4)
    assert (run.state.steps["a"].done, run.state.steps["a"].failed) == (1, 1)  # type: ignore[index]


def test_a_lost_attempt_counts_neither_as_done_nor_as_failed() -> None:
    run = three_items()
    run.expire("a.1/1#1")

    loop = run.state.visits["a.1"].loop  # type: ignore[index]
    assert loop is not None
    assert (loop.done, loop.failed, loop.in_flight) == (0, 0, 3)
    assert "a.1/1#2" in run.open


def test_an_old_visit_does_not_change_the_counts_of_the_latest() -> None:
    """Two tokens enter the step: it is a loop of two items that runs twice at once."""
    run = Run(
        playbook(
            step("a", "b", "b", inclusive=True, router=True),
            step("b", join="any", loop=loop_over([1, 2])),
        )
    )
    run.done("b.1/0#1")
    counts = run.state.steps["b"]  # type: ignore[index]
    assert (counts.visit, counts.total, counts.done) == (2, 2, 0)

    run.done("b.2/0#1", "b.2/1#1")
    assert counts.done == 2


def test_the_result_of_a_step_is_the_one_that_was_left_last() -> None:
    again = "{{ ctx.n | default(0) < 1 }}"
    run = Run(playbook(step("a", arc("a", again, n=1), arc("b")), step("b")))
    run.done("a.1#1", value="first")
    run.done("a.2#1", value="second")

    result = run.state.steps["a"].result  # type: ignore[index]
    assert result is not None
    assert run.known.document(result) == "second"


def test_a_handled_failure_leaves_the_step_failed_and_the_execution_running() -> None:
    run = Run(playbook(step("a", arc("b", FAILED)), step("b")))
    run.fail("a.1#1")

    assert run.state.steps["a"].status == "FAILED"  # type: ignore[index]
    assert run.state.steps["a"].error is not None  # type: ignore[index]
    assert run.state.status == "RUNNING"


def test_the_end_of_an_execution_leaves_nothing_open() -> None:
    run = Run(playbook(step("a", "b", "c", inclusive=True, router=True), step("b"), step("c")))
    run.fail("b.1#1")

    assert run.state.status == "FAILED"
    assert run.state.steps["c"].status == "CANCELLED"  # type: ignore[index]
    assert not run.state.visits
    assert not run.state.commands


def test_ctx_is_written_in_the_order_of_the_log() -> None:
    run = three_items()
    run.done("a.1/2#1", last=2)
    run.done("a.1/0#1", last=0)

    assert run.state.ctx == {"last": 0}
    ends = [f for f in run.facts if isinstance(f, CallDone | CommandIssued)]
    assert ends[-1].iter_index == 0


@pytest.mark.parametrize(("retryable", "failed"), [(True, 0), (False, 1)])
def test_a_lost_item_of_an_older_log_has_failed_only_if_no_attempt_followed(
    *, retryable: bool, failed: int
) -> None:
    run = Run(playbook(step("a", loop=loop_over([1, 2]))))
    lost = CommandExpired(
        step=StepName("a"),
        visit=1,
        command_id=CommandId("a.1/0#1"),
        iter_index=0,
        error=ToolError(kind="lost", message="gone", retryable=retryable),
    )
    event = Event(execution_id=EXECUTION, event_id=EventId(9_999), fact=lost)

    assert fold(run.state, event).steps[StepName("a")].failed == failed
