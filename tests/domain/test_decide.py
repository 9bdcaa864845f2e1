"""decide: which facts follow, in the order of the log."""

from noetl_broker.accept import COMMAND_ATTEMPTS_MAX
from noetl_core.domain.events import ExecutionCompleted, ExecutionFailed, StepExited, StepFailed
from support.running import FAILED, Run, arc, loop_over, playbook, step


def test_a_start_enters_the_first_step_and_issues_its_command() -> None:
    run = Run(playbook(step("a", "b"), step("b")))

    assert run.said == ["execution.started", "step.enter a.1", "command.issued a.1#1"]


def test_a_step_is_left_and_the_next_is_entered_when_its_call_is_done() -> None:
    run = Run(playbook(step("a", "b"), step("b")))
    run.done("a.1#1")

    assert run.said[3:] == [
        "call.done a.1#1",
        "step.exit a.1",
        "step.enter b.1",
        "command.issued b.1#1",
    ]


def test_an_execution_completes_once_no_token_is_left() -> None:
    run = Run(playbook(step("a", "b", "c", inclusive=True), step("b"), step("c")))
    run.done("a.1#1", "b.1#1")
    assert run.state.status == "RUNNING"

    run.done("c.1#1")
    assert run.said[-1] == "execution.completed"
    assert sum(isinstance(fact, ExecutionCompleted) for fact in run.facts) == 1


def test_a_step_without_a_tool_is_passed_in_the_same_turn() -> None:
    run = Run(playbook(step("a", "b", router=True), step("b", "c", router=True), step("c")))

    assert run.open == ["c.1#1"]


def test_an_unhandled_failure_fails_the_execution_and_names_the_step() -> None:
    run = Run(playbook(step("a", "b"), step("b")))
    run.fail("a.1#1")

    end = run.facts[-1]
    assert isinstance(end, ExecutionFailed)
    assert (end.step, end.error.kind) == ("a", "boom")
    assert not run.entered("b")


def test_a_failure_arc_lets_the_execution_complete() -> None:
    run = Run(playbook(step("a", arc("b"), arc("c", FAILED)), step("b"), step("c")))
    run.fail("a.1#1")
    run.done("c.1#1")

    assert run.state.status == "COMPLETED"
    assert not run.entered("b")


def test_nothing_is_recorded_after_a_branch_has_failed_the_execution() -> None:
    """Both steps are entered in one turn; the first cannot start its loop."""
    run = Run(
        playbook(
            step("a", "b", "c", inclusive=True, router=True),
            step("b", loop=loop_over("{{ nowhere }}")),
            step("c"),
        )
    )

    assert isinstance(run.facts[-1], ExecutionFailed)
    assert run.said[-4:] == ["step.enter b.1", "step.enter c.1", "step.failed b.1", run.said[-1]]


def test_a_late_report_to_an_ended_execution_is_nothing() -> None:
    run = Run(playbook(step("a", "b", "c", inclusive=True, router=True), step("b"), step("c")))
    run.fail("b.1#1")
    before = run.said

    run.done("c.1#1")
    run.cancel()
    run.expire("c.1#1")

    assert run.said == before


def test_a_cancelled_execution_issues_nothing_more() -> None:
    run = Run(playbook(step("a", "b"), step("b")))
    run.cancel()
    run.done("a.1#1")

    assert run.said[-1] == "execution.cancelled"


def test_each_entry_into_a_step_is_a_visit_of_its_own() -> None:
    again = "{{ ctx.n | default(0) < 2 }}"
    count = "{{ ctx.n | default(0) + 1 }}"
    run = Run(playbook(step("a", arc("a", again, n=count))))
    run.done("a.1#1", "a.2#1", "a.3#1")

    assert [entry.visit for entry in run.entered("a")] == [1, 2, 3]
    assert run.state.status == "COMPLETED"


def test_two_arcs_to_one_step_are_two_visits() -> None:
    run = Run(playbook(step("a", "b", "b", inclusive=True), step("b", join="any")))
    run.done("a.1#1")

    assert run.open == ["b.1#1", "b.2#1"]


def test_a_step_reached_directly_and_through_a_router_in_one_turn_is_visited_twice() -> None:
    run = Run(
        playbook(
            step("a", "r", "b", inclusive=True),
            step("r", "b", router=True),
            step("b", join="any"),
        )
    )
    run.done("a.1#1")

    assert sorted(run.open) == ["b.1#1", "b.2#1"]


def test_a_barrier_that_opens_while_a_router_is_passed_is_entered_once() -> None:
    """`p` waits at the barrier; `a` goes elsewhere, through a router that ends its branch."""
    run = Run(
        playbook(
            step("s", "a", "p", inclusive=True, router=True),
            step("a", arc("x"), arc("b", "no")),
            step("p", "b"),
            step("x", router=True),
            step("b"),
        )
    )
    run.done("p.1#1")
    assert not run.entered("b")

    run.done("a.1#1")
    assert [entry.tokens for entry in run.entered("b")] == [1]


def test_a_barrier_runs_once_for_all_branches_that_reach_it() -> None:
    run = Run(
        playbook(
            step("a", "b", "c", inclusive=True, router=True),
            step("b", "d"),
            step("c", "d"),
            step("d"),
        )
    )
    run.done("b.1#1")
    assert not run.entered("d")

    run.done("c.1#1")
    assert [entry.tokens for entry in run.entered("d")] == [2]


def test_a_branch_that_is_not_taken_never_keeps_a_barrier_waiting() -> None:
    run = Run(
        playbook(
            step("a", arc("b"), arc("c", "no"), inclusive=True, router=True),
            step("b", "d"),
            step("c", "d"),
            step("d"),
        )
    )
    run.done("b.1#1")

    assert run.open == ["d.1#1"]


def test_a_barrier_waits_for_a_token_that_waits_at_another_before_it() -> None:
    run = Run(
        playbook(
            step("s", "a", "b", "c", inclusive=True, router=True),
            step("a", "j"),
            step("b", "j"),
            step("c", "k"),
            step("j", "k"),
            step("k"),
        )
    )
    run.done("a.1#1", "c.1#1")
    assert not run.entered("j")
    assert not run.entered("k")

    run.done("b.1#1")
    assert run.open == ["j.1#1"]
    run.done("j.1#1")
    assert [entry.tokens for entry in run.entered("k")] == [2]


def test_join_any_runs_the_step_for_every_token() -> None:
    run = Run(
        playbook(
            step("a", "b", "c", inclusive=True, router=True),
            step("b", "d"),
            step("c", "d"),
            step("d", join="any"),
        )
    )
    run.done("b.1#1", "c.1#1")

    assert run.open == ["d.1#1", "d.2#1"]


def test_a_failed_branch_that_is_handled_still_opens_the_barrier() -> None:
    run = Run(
        playbook(
            step("a", "b", "c", inclusive=True, router=True),
            step("b", arc("d"), arc("e", FAILED)),
            step("c", "d"),
            step("d"),
            step("e"),
        )
    )
    run.done("c.1#1")
    run.fail("b.1#1")

    assert sorted(run.open) == ["d.1#1", "e.1#1"]


def test_a_lost_attempt_is_issued_again_under_a_new_id() -> None:
    run = Run(playbook(step("a")))
    run.expire("a.1#1")

    assert run.said[-2:] == ["command.expired a.1#1", "command.issued a.1#2"]


def test_what_an_expired_attempt_reports_is_nothing() -> None:
    run = Run(playbook(step("a")))
    run.expire("a.1#1")
    run.done("a.1#1")

    assert run.open == ["a.1#2"]


def test_a_command_that_is_lost_too_often_fails_its_step() -> None:
    run = Run(playbook(step("a", arc("b", FAILED)), step("b")))
    for attempt in range(1, COMMAND_ATTEMPTS_MAX + 1):
        run.expire(f"a.1#{attempt}")

    left = run.left("a")
    assert isinstance(left, StepFailed)
    assert left.error.kind == "lost"
    assert run.open == ["b.1#1"]


def test_a_step_after_a_router_follows_the_result_before_the_router() -> None:
    run = Run(playbook(step("a", "r"), step("r", "b", router=True), step("b")))
    run.done("a.1#1", value=1)

    result = run.left("a").result
    assert result.reference is not None
    assert run.entered("b")[0].parent_ref == result.reference.ref_id


def test_the_result_of_an_execution_is_that_of_the_step_that_ended_it() -> None:
    run = Run(playbook(step("a", "b"), step("b")))
    run.done("a.1#1", value=1)
    run.done("b.1#1", value=2)

    end = run.facts[-1]
    assert isinstance(end, ExecutionCompleted)
    assert run.known.document(end.result) == 2


def test_a_step_is_left_by_one_event_only() -> None:
    run = Run(playbook(step("a", "b"), step("b")))
    run.done("a.1#1")
    run.done("a.1#1")

    assert sum(isinstance(f, StepExited) and f.step == "a" for f in run.facts) == 1
