"""Where a token goes: guards, `set`, failure arcs, and when a barrier opens."""

from typing import Any

import pytest

from noetl_core.domain.ctx import RECORDED_BYTES_MAX
from noetl_core.domain.events import StepExited, StepFailed
from noetl_core.domain.ids import StepName
from noetl_core.domain.playbook import Arc
from noetl_core.domain.route import ready_barriers
from noetl_core.domain.state import ExecutionState, Visit
from support.running import FAILED, Run, arc, loop_over, playbook, step


def leaving(*arcs: Arc, value: Any = None, **how: Any) -> StepExited | StepFailed:
    """How a step with these arcs is left when its tool has returned the value."""
    run = Run(playbook(step("a", *arcs, **how), step("b"), step("c"), workload_flag=True))
    run.done("a.1#1", value=value)
    return run.left("a")


def targets(left: StepExited | StepFailed) -> list[str]:
    return [hop.step for hop in left.hops]


def test_exclusive_takes_the_first_arc_that_is_true() -> None:
    left = leaving(arc("b", "{{ output.data.n > 5 }}"), arc("c"), arc("b"), value={"n": 1})

    assert targets(left) == ["c"]


def test_inclusive_takes_every_arc_that_is_true() -> None:
    left = leaving(arc("b"), arc("b", "no"), arc("c"), inclusive=True)

    assert targets(left) == ["b", "c"]


@pytest.mark.parametrize("text", ["false", "0", "No", "none", " "])
def test_a_guard_that_gives_a_word_for_no_is_false(text: str) -> None:
    assert targets(leaving(arc("b", text), arc("c"))) == ["c"]


def test_exclusive_does_not_ask_guards_after_the_one_that_is_true() -> None:
    assert targets(leaving(arc("b"), arc("c", "{{ nowhere }}"))) == ["b"]


def test_a_guard_that_raises_fails_the_step_and_names_the_field() -> None:
    left = leaving(arc("b", "{{ nowhere }}"), arc("c"))

    assert isinstance(left, StepFailed)
    assert left.error.kind == "template_rendering"
    assert left.error.details["field"] == "next.arcs[0].when"
    assert not left.handled


def test_a_guard_that_raises_is_a_failure_that_an_arc_can_take() -> None:
    left = leaving(arc("b", "{{ nowhere }}"), arc("c", FAILED))

    assert isinstance(left, StepFailed)
    assert left.handled
    assert targets(left) == ["c"]


def test_without_a_match_the_branch_ends() -> None:
    left = leaving(arc("b", "no"))

    assert isinstance(left, StepExited)
    assert left.hops == ()


def test_without_a_match_the_step_fails_where_that_is_asked_for() -> None:
    left = leaving(arc("b", "no"), on_no_match="fail")

    assert isinstance(left, StepFailed)


def test_guards_see_what_the_step_sets() -> None:
    left = leaving(
        arc("b", "{{ ctx.total == 3 }}"), arc("c"), value={"n": 3}, total="{{ output.n }}"
    )

    assert targets(left) == ["b"]
    assert left.ctx == {"total": 3}


def test_no_guard_sees_what_another_arc_sets() -> None:
    again = "{{ ctx.taken | default(false) }}"
    left = leaving(arc("b", taken=True), arc("c", again), inclusive=True)

    assert targets(left) == ["b"]


def test_the_set_of_an_arc_comes_after_that_of_the_step_and_sees_it() -> None:
    left = leaving(arc("b", n="{{ ctx.n + 1 }}"), n=1)

    assert left.ctx == {"n": 2}


def test_the_keys_of_one_set_do_not_see_each_other() -> None:
    run = Run(
        playbook(
            step("a", "b", router=True, n=1),
            step("b", router=True, n=2, old="{{ ctx.n }}"),
        )
    )

    assert run.state.ctx == {"n": 2, "old": 1}


def test_an_arc_that_is_not_taken_sets_nothing() -> None:
    assert leaving(arc("b", "no", n=1), arc("c")).ctx == {}


def test_what_is_set_is_the_same_in_any_order_of_the_keys() -> None:
    """jsonb keeps no order: `seen.by` must not come back after the `seen` that replaced it."""
    sets: dict[str, Any] = {"seen.by": 0}
    left = leaving(arc("b", seen={"new": 1}), **sets)

    assert left.ctx == {"seen": {"new": 1}}


def test_a_ctx_that_would_be_a_payload_fails_the_step() -> None:
    left = leaving(arc("b"), value="x" * RECORDED_BYTES_MAX, all="{{ output.data }}")

    assert isinstance(left, StepFailed)
    assert "keep the data in the step's result" in left.error.message


def test_a_failure_does_not_take_arcs_that_do_not_look_at_it() -> None:
    run = Run(
        playbook(
            step("a", arc("b"), arc("b", "{{ workload.flag }}"), arc("c", FAILED)),
            step("b"),
            step("c"),
            flag=True,
        )
    )
    run.fail("a.1#1")

    assert targets(run.left("a")) == ["c"]


@pytest.mark.parametrize(
    "guard",
    [
        "{{ event.name == 'call.error' }}",
        "{{ error.kind == 'boom' }}",
        "{{ output.status == 'error' }}",
        "{{ error }}",
    ],
)
def test_a_failure_is_seen_by_its_name_its_status_and_its_error(guard: str) -> None:
    run = Run(playbook(step("a", arc("b", guard)), step("b")))
    run.fail("a.1#1")

    assert targets(run.left("a")) == ["b"]


def test_on_a_failure_a_guard_that_raises_is_not_taken() -> None:
    run = Run(
        playbook(
            step("a", arc("b", "{{ output.data.n > 5 }}"), arc("c", FAILED)), step("b"), step("c")
        )
    )
    run.fail("a.1#1")

    assert targets(run.left("a")) == ["c"]


def test_a_success_takes_no_failure_arc() -> None:
    assert targets(leaving(arc("b", FAILED), arc("c"))) == ["c"]


def test_a_failed_step_sets_nothing_but_what_its_failure_arc_does() -> None:
    run = Run(playbook(step("a", arc("b", FAILED, why="{{ error.kind }}"), n=1), step("b")))
    run.fail("a.1#1")

    assert run.state.ctx == {"why": "boom"}


def test_a_failure_is_not_hidden_by_one_in_the_arc_that_takes_it() -> None:
    run = Run(playbook(step("a", arc("b", FAILED, x="{{ nowhere }}")), step("b")))
    run.fail("a.1#1")

    left = run.left("a")
    assert isinstance(left, StepFailed)
    assert left.error.kind == "boom"
    assert "nowhere" in left.error.details["while_handling"]
    assert run.state.status == "FAILED"


def test_a_loop_is_left_by_loop_done_with_its_counts() -> None:
    guard = "{{ event.name == 'loop.done' and output.stats.failed == 1 }}"
    run = Run(
        playbook(
            step("a", arc("b", guard), loop=loop_over([1, 2]), best_effort=True),
            step("b"),
        )
    )
    run.fail("a.1/0#1")
    run.done("a.1/1#1")

    assert run.open == ["b.1#1"]


def test_a_barrier_is_ready_when_no_live_token_can_reach_it() -> None:
    book = playbook(
        step("a", "b", "c", inclusive=True),
        step("b", "d"),
        step("c", "d"),
        step("d", "e"),
        step("e"),
    )
    state = ExecutionState(execution_id=1, arrivals={"d": 1})  # type: ignore[arg-type,dict-item]

    def with_token_at(name: str) -> list[StepName]:
        visit = Visit(step=StepName(name), visit=1)
        state.visits = {f"{name}.1": visit}  # type: ignore[dict-item]
        return ready_barriers(book, state)

    assert with_token_at("c") == []
    assert with_token_at("e") == ["d"]


def test_barriers_that_open_together_do_so_in_an_order_that_storing_keeps() -> None:
    book = playbook(
        step("s", "a", "b", "x", "y", inclusive=True),
        *(step(name, "x", "y", inclusive=True) for name in ("a", "b")),
        step("x"),
        step("y"),
    )
    ready = [
        ready_barriers(book, ExecutionState(execution_id=1, arrivals=dict.fromkeys(order, 1)))  # type: ignore[arg-type]
        for order in ("xy", "yx")
    ]

    assert ready[0] == ready[1] == ["x", "y"]
