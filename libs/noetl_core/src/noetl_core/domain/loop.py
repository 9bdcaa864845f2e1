"""What a loop does next: store its collection in parts, keep its window full, end once.

Counters are all it has. `in_flight` + `done` + `failed` = `next_index` at every moment, and the log
refuses to record an attempt's end twice, so the counts are exact and a million items cost no more
state than ten.
"""

from collections.abc import Iterator
from typing import Any

from noetl_core.domain.events import CommandIssued, LoopDone, LoopStarted
from noetl_core.domain.ids import LoopId, StepName, command_id
from noetl_core.domain.playbook import Step
from noetl_core.domain.state import LoopState

PART_SIZE = 500
"""Items in one stored part of a collection."""


def start_loop(step: Step, visit: int, collection: list[Any]) -> LoopStarted:
    assert step.loop is not None, step.step
    spec = step.loop.spec
    return LoopStarted(
        step=step.step,
        visit=visit,
        total=len(collection),
        part_size=PART_SIZE,
        parts=-(-len(collection) // PART_SIZE),
        max_in_flight=1 if spec.mode == "sequential" else spec.max_in_flight,
        fail_fast=step.spec.policy.failure.mode == "fail_fast",
    )


def split(collection: list[Any], part_size: int) -> Iterator[list[Any]]:
    for start in range(0, len(collection), part_size):
        yield collection[start : start + part_size]


def advance_loop(step: Step, visit: int, loop: LoopState) -> tuple[CommandIssued | LoopDone, ...]:
    """Fill the window, or, when nothing is left to issue and nothing is open, end the loop."""
    gave_up = loop.fail_fast and loop.failed > 0
    last = loop.next_index if gave_up else loop.total
    until = min(last, loop.next_index + loop.max_in_flight - loop.in_flight)
    if until > loop.next_index:
        return tuple(
            issue(step, visit, index=index, loop_id=loop.loop_id)
            for index in range(loop.next_index, until)
        )
    if loop.in_flight == 0:
        return (_end_loop(step.step, visit, loop),)
    return ()


def issue(
    step: Step,
    visit: int,
    *,
    index: int | None = None,
    loop_id: LoopId | None = None,
    attempt: int = 1,
) -> CommandIssued:
    return CommandIssued(
        step=step.step,
        visit=visit,
        command_id=command_id(step.step, visit, index=index, attempt=attempt),
        attempt=attempt,
        loop_id=loop_id,
        iter_index=index,
        pool=step.spec.pool,
        priority=step.spec.priority,
    )


def _end_loop(step: StepName, visit: int, loop: LoopState) -> LoopDone:
    return LoopDone(
        step=step,
        visit=visit,
        loop_id=loop.loop_id,
        total=loop.total,
        done=loop.done,
        failed=loop.failed,
        status="error" if loop.failed and loop.fail_fast else "ok",
    )
