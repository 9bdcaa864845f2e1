"""The brief of a command: what its worker reads, and nothing else."""

from typing import Any

import pytest

from noetl_core.domain.brief import (
    ELEMENT_BYTES_MAX,
    Brief,
    Element,
    brief_for,
    decode_brief,
    encode_brief,
)
from noetl_core.domain.errors import ReferenceNeeded
from noetl_core.domain.events import CommandIssued
from noetl_core.domain.ids import LoopId
from noetl_core.domain.known import Known
from noetl_core.domain.playbook import Playbook, Step, Task
from support.running import Run, arc, loop_over, playbook, step


def reading(name: str, **inputs: str) -> Step:
    task = Task(label="task_0", kind="noop", input=inputs)
    return Step(step=name, tool=(task,))  # type: ignore[arg-type]


def brief_of(run: Run, command: str, known: Known | None = None) -> Brief:
    issued = [f for f in run.facts if isinstance(f, CommandIssued) and f.command_id == command]
    return brief_for(run.playbook, run.state, issued[-1], known or run.known)


def led_to_b(*, ctx: dict[str, Any], **inputs: str) -> Run:
    run = Run(playbook(step("a", "b", **ctx), reading("b", **inputs)))
    run.done("a.1#1", value={"n": 1})
    return run


def test_a_brief_says_which_attempt_at_which_visit_it_is_for() -> None:
    run = Run(playbook(step("a")))
    run.expire("a.1#1")
    brief = brief_of(run, "a.1#2")

    assert (brief.catalog_id, brief.step, brief.visit, brief.attempt) == (7, "a", 1, 2)


def test_a_brief_carries_the_results_that_its_step_reads() -> None:
    run = led_to_b(ctx={}, n="{{ a.n }}")

    assert brief_of(run, "b.1#1").steps == {"a": run.left("a").result}


def test_a_brief_leaves_out_the_results_that_its_step_does_not_read() -> None:
    assert brief_of(led_to_b(ctx={}), "b.1#1").steps == {}


def test_a_brief_carries_the_keys_of_ctx_that_its_step_reads() -> None:
    run = led_to_b(ctx={"x": 1, "y": 2}, n="{{ ctx.x }}")

    assert brief_of(run, "b.1#1").ctx == {"x": 1}


def test_a_brief_carries_all_of_ctx_for_a_step_that_reads_it_whole() -> None:
    run = led_to_b(ctx={"x": 1, "y": 2}, n="{{ ctx }}")

    assert brief_of(run, "b.1#1").ctx == {"x": 1, "y": 2}


def test_a_brief_names_the_result_before_it() -> None:
    run = led_to_b(ctx={})
    reference = run.left("a").result.reference

    assert reference is not None
    assert brief_of(run, "b.1#1").parent_ref == reference.ref_id


def looping(collection: list[Any], max_in_flight: int = 100) -> Run:
    return Run(playbook(step("a", loop=loop_over(collection, max_in_flight=max_in_flight))))


def test_the_brief_of_an_iteration_carries_its_element() -> None:
    element = brief_of(looping(["x", "y", "z"]), "a.1/1#1").element

    assert element is not None
    assert (element.index, element.total, element.value) == (1, 3, "y")


def test_an_item_after_the_first_part_is_found_in_its_own() -> None:
    run = looping(list(range(600)), max_in_flight=600)
    element = brief_of(run, "a.1/501#1").element

    assert element is not None
    assert (element.part, element.offset, element.value) == (1, 1, 501)


def test_a_large_element_is_left_where_it_is_stored() -> None:
    element = brief_of(looping(["x" * ELEMENT_BYTES_MAX, "small"]), "a.1/0#1").element

    assert element is not None
    assert not element.is_inline
    assert element.value is None


def test_an_element_whose_part_is_not_loaded_is_asked_for() -> None:
    run = looping(["x"])
    with pytest.raises(ReferenceNeeded) as asked:
        brief_of(run, "a.1/0#1", Known())

    assert asked.value.part == 0
    assert asked.value.loop_id == LoopId(run.events[2].event_id)


def test_a_second_attempt_gets_the_element_of_the_first() -> None:
    run = looping(["x", "y"])
    run.expire("a.1/1#1")

    first, second = brief_of(run, "a.1/1#1").element, brief_of(run, "a.1/1#2").element
    assert first == second


def test_a_brief_comes_back_from_its_bytes() -> None:
    run = looping([{"deep": [1, None, "x"]}])
    brief = brief_of(run, "a.1/0#1")

    assert isinstance(brief.element, Element)
    assert decode_brief(encode_brief(brief)) == brief


def test_a_step_entered_twice_gets_the_result_that_came_last() -> None:
    again = "{{ ctx.n | default(0) < 1 }}"
    book: Playbook = playbook(step("a", arc("a", again, n=1), arc("b")), reading("b", n="{{ a }}"))
    run = Run(book)
    run.done("a.1#1", value=1)
    run.done("a.2#1", value=2)

    result = brief_of(run, "b.1#1").steps["a"]  # type: ignore[index]
    assert run.known.document(result) == 2
