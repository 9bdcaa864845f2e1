"""Loops: windows, order, failures, and exactly one end."""

from typing import Any

import pytest

from noetl_core.domain.events import CommandIssued, LoopDone, LoopStarted, StepFailed
from noetl_core.domain.ids import LoopId
from noetl_core.domain.known import Known
from noetl_core.domain.loop import PART_SIZE, advance_loop, split, start_loop
from noetl_core.domain.state import LoopState
from support.running import FAILED, Run, arc, loop_over, playbook, step


def looping(collection: Any, *, best_effort: bool = False, **how: Any) -> Run:
    loop = loop_over(collection, **how)
    return Run(playbook(step("a", loop=loop, best_effort=best_effort), rows=[1, 2, 3]))


def ends(run: Run) -> list[LoopDone]:
    return [fact for fact in run.facts if isinstance(fact, LoopDone)]


def test_a_parallel_loop_opens_at_most_its_window() -> None:
    run = looping([1, 2, 3, 4, 5], max_in_flight=2)
    assert run.open == ["a.1/0#1", "a.1/1#1"]

    run.done("a.1/1#1")
    assert run.open == ["a.1/0#1", "a.1/2#1"]


def test_a_sequential_loop_runs_one_item_after_the_other() -> None:
    run = looping([1, 2, 3], sequential=True, max_in_flight=10)
    for index in range(3):
        assert run.open == [f"a.1/{index}#1"]
        run.done(f"a.1/{index}#1")

    assert run.state.status == "COMPLETED"


def test_a_loop_ends_once_when_its_last_item_has() -> None:
    run = looping([1, 2, 3])
    run.done("a.1/2#1", "a.1/0#1")
    assert not ends(run)

    run.done("a.1/1#1")
    assert [(end.total, end.done, end.failed, end.status) for end in ends(run)] == [(3, 3, 0, "ok")]


def test_an_empty_list_ends_at_once() -> None:
    run = looping([])

    assert run.said[2:] == [
        "loop.started a.1",
        "loop.done a.1",
        "step.exit a.1",
        "execution.completed",
    ]


def test_a_template_gives_the_list() -> None:
    assert len(looping("{{ workload.rows }}").open) == 3


@pytest.mark.parametrize("collection", ["{{ range(3) }}", "{{ (1, 2, 3) }}"])
def test_what_is_as_good_as_a_list_is_one(collection: str) -> None:
    assert len(looping(collection).open) == 3


@pytest.mark.parametrize(
    ("collection", "kind"), [("{{ 7 }}", "int"), ("text", "str"), ("{{ workload }}", "dict")]
)
def test_anything_but_a_list_fails_the_step_with_its_name_and_type(
    collection: str, kind: str
) -> None:
    run = looping(collection)

    left = run.left("a")
    assert isinstance(left, StepFailed)
    assert "'a'" in left.error.message
    assert kind in left.error.message
    assert not any(isinstance(fact, LoopStarted) for fact in run.facts)


def test_fail_fast_issues_nothing_more_and_fails_when_what_is_open_has_ended() -> None:
    run = looping([1, 2, 3, 4], max_in_flight=2)
    run.fail("a.1/0#1")
    assert run.open == ["a.1/1#1"]

    run.done("a.1/1#1")
    assert [(end.done, end.failed, end.status) for end in ends(run)] == [(1, 1, "error")]
    assert run.state.status == "FAILED"


def test_best_effort_runs_every_item_and_ends_well() -> None:
    run = looping([1, 2, 3], best_effort=True, max_in_flight=1)
    run.fail("a.1/0#1")
    run.done("a.1/1#1")
    run.fail("a.1/2#1")

    assert [(end.done, end.failed, end.status) for end in ends(run)] == [(1, 2, "ok")]
    assert run.state.status == "COMPLETED"


def test_the_failure_of_a_loop_can_be_taken_by_an_arc() -> None:
    run = Run(playbook(step("a", arc("b", FAILED), loop=loop_over([1])), step("b")))
    run.fail("a.1/0#1")

    assert run.open == ["b.1#1"]


def test_a_lost_item_is_issued_again_inside_the_window() -> None:
    run = looping([1, 2, 3], max_in_flight=2)
    run.expire("a.1/0#1")

    assert sorted(run.open) == ["a.1/0#2", "a.1/1#1"]


def test_a_lost_item_is_issued_again_even_after_another_failed() -> None:
    run = looping([1, 2], max_in_flight=2)
    run.fail("a.1/0#1")
    run.expire("a.1/1#1")
    assert run.open == ["a.1/1#2"]

    run.done("a.1/1#2")
    assert len(ends(run)) == 1


def test_an_item_lost_too_often_has_failed() -> None:
    run = looping([1, 2], best_effort=True)
    for attempt in range(1, 6):
        run.expire(f"a.1/0#{attempt}")
    run.done("a.1/1#1")

    assert [(end.done, end.failed) for end in ends(run)] == [(1, 1)]


def test_each_visit_is_a_loop_of_its_own() -> None:
    again = "{{ ctx.n | default(0) < 1 }}"
    run = Run(playbook(step("a", arc("a", again, n=1), loop=loop_over([1, 2]))))
    run.done("a.1/0#1", "a.1/1#1")
    assert run.open == ["a.2/0#1", "a.2/1#1"]

    run.done("a.2/1#1", "a.2/0#1")
    assert len({end.loop_id for end in ends(run)}) == 2


def test_two_visits_at_once_keep_their_counts_apart() -> None:
    run = Run(
        playbook(
            step("s", "a", "a", inclusive=True, router=True),
            step("a", join="any", loop=loop_over([1, 2])),
        )
    )
    run.done("a.1/0#1", "a.2/0#1", "a.2/1#1")
    assert [end.visit for end in ends(run)] == [2]

    run.done("a.1/1#1")
    assert [end.visit for end in ends(run)] == [2, 1]


def test_every_command_of_a_loop_names_it() -> None:
    run = looping([1, 2])

    started = next(e for e in run.events if isinstance(e.fact, LoopStarted))
    issued = [fact for fact in run.facts if isinstance(fact, CommandIssued)]
    assert {fact.loop_id for fact in issued} == {LoopId(started.event_id)}


def test_a_collection_is_stored_in_parts() -> None:
    items = list(range(PART_SIZE + 1))
    started = start_loop(step("a", loop=loop_over(items)), 1, items)

    assert (started.total, started.parts) == (PART_SIZE + 1, 2)
    assert [len(part) for part in split(items, started.part_size)] == [PART_SIZE, 1]


def test_a_million_items_are_counted_not_listed() -> None:
    loop = LoopState(
        loop_id=LoopId(1),
        total=1_000_000,
        part_size=PART_SIZE,
        parts=2000,
        max_in_flight=3,
        next_index=999_998,
        in_flight=2,
        done=999_996,
    )
    following = advance_loop(step("a", loop=loop_over([])), 1, loop, Known())

    assert [fact.iter_index for fact in following if isinstance(fact, CommandIssued)] == [999_998]
