"""fold: what is true after an event. Pure: no template, no guard, no clock, no playbook.

An event at or before the state's watermark changes nothing, so folding any prefix twice is folding
it once. The state it is given is updated in place and returned: nobody else holds it, and a copy
per event would make a loop of a thousand items cost a thousand copies.
"""

from typing import assert_never

from noetl_core.domain.ctx import merge_ctx
from noetl_core.domain.events import (
    AnyFact,
    CallDone,
    CallFailed,
    CheckpointCommitted,
    CommandClaimed,
    CommandExpired,
    CommandIssued,
    Event,
    ExecutionCancelled,
    ExecutionCompleted,
    ExecutionFailed,
    ExecutionStarted,
    LoopDone,
    LoopStarted,
    StepEntered,
    StepExited,
    StepFailed,
)
from noetl_core.domain.ids import EventId, LoopId, visit_id
from noetl_core.domain.state import (
    ExecutionState,
    ExecutionStatus,
    LoopState,
    OpenCommand,
    StepState,
    Visit,
)


def fold(state: ExecutionState, event: Event) -> ExecutionState:
    if event.event_id > state.last_event_id:
        _apply(state, event.fact, event.event_id)
        state.last_event_id = event.event_id
    return state


def _apply(  # noqa: C901, PLR0912 - one case an event
    state: ExecutionState, fact: AnyFact, event_id: EventId
) -> None:
    match fact:
        case CommandIssued():
            _issue(state, fact)
        case CommandClaimed():
            state.commands[fact.command_id].worker_id = fact.worker_id
        case CallDone():
            merge_ctx(state.ctx, fact.ctx)
            _close(state, fact, done=1)
        case CallFailed():
            merge_ctx(state.ctx, fact.ctx)
            _close(state, fact, failed=1)
        case CommandExpired():
            _close(state, fact, failed=1 if fact.final else 0)
        case StepEntered():
            _enter(state, fact)
        case LoopStarted():
            _start_loop(state, fact, LoopId(event_id))
        case StepExited() | StepFailed():
            _leave(state, fact)
        case ExecutionStarted():
            state.catalog_id, state.payload = fact.catalog_id, fact.result
            state.status = "RUNNING"
        case ExecutionCompleted():
            _end(state, "COMPLETED")
        case ExecutionFailed():
            state.error = fact.error
            _end(state, "FAILED")
        case ExecutionCancelled():
            _end(state, "CANCELLED")
        case CheckpointCommitted():
            state.epoch = fact.barrier
        case LoopDone():
            pass  # its counts are in the state already; the step is left by the next event
        case _:
            assert_never(fact)


def _issue(state: ExecutionState, fact: CommandIssued) -> None:
    state.commands[fact.command_id] = OpenCommand(
        step=fact.step, visit=fact.visit, attempt=fact.attempt, index=fact.iter_index
    )
    if fact.iter_index is not None:
        loop = loop_of(state, fact.step, fact.visit)
        loop.in_flight += 1
        loop.next_index = max(loop.next_index, fact.iter_index + 1)


def _close(
    state: ExecutionState,
    fact: CallDone | CallFailed | CommandExpired,
    *,
    done: int = 0,
    failed: int = 0,
) -> None:
    del state.commands[fact.command_id]
    if fact.iter_index is not None:
        loop = loop_of(state, fact.step, fact.visit)
        loop.in_flight -= 1
        loop.done += done
        loop.failed += failed
        if failed and loop.first_error is None and not isinstance(fact, CallDone):
            loop.first_error = fact.error
        step = state.steps[fact.step]
        if step.visit == fact.visit:
            step.done, step.failed = loop.done, loop.failed


def _enter(state: ExecutionState, fact: StepEntered) -> None:
    waiting = state.arrivals.pop(fact.step, 0) - fact.tokens
    if waiting > 0:
        state.arrivals[fact.step] = waiting
    state.visits[visit_id(fact.step, fact.visit)] = Visit(
        step=fact.step, visit=fact.visit, parent_ref=fact.parent_ref
    )
    step = state.steps.setdefault(fact.step, StepState())
    step.visit, step.status = fact.visit, "RUNNING"


def _start_loop(state: ExecutionState, fact: LoopStarted, loop_id: LoopId) -> None:
    state.visits[visit_id(fact.step, fact.visit)].loop = LoopState(
        loop_id=loop_id,
        total=fact.total,
        part_size=fact.part_size,
        parts=fact.parts,
        max_in_flight=fact.max_in_flight,
        fail_fast=fact.fail_fast,
    )
    step = state.steps[fact.step]
    if step.visit == fact.visit:
        step.total, step.done, step.failed = fact.total, 0, 0


def _leave(state: ExecutionState, fact: StepExited | StepFailed) -> None:
    del state.visits[visit_id(fact.step, fact.visit)]
    step = state.steps[fact.step]
    step.result = fact.result
    step.error = fact.error if isinstance(fact, StepFailed) else None
    if step.visit == fact.visit:
        step.status = "FAILED" if isinstance(fact, StepFailed) else "COMPLETED"
    merge_ctx(state.ctx, fact.ctx)
    for hop in fact.hops:
        state.arrivals[hop.step] = state.arrivals.get(hop.step, 0) + 1


def _end(state: ExecutionState, status: ExecutionStatus) -> None:
    state.status = status
    for visit in state.visits.values():
        state.steps[visit.step].status = "CANCELLED"
    state.visits.clear()
    state.arrivals.clear()
    state.commands.clear()


def loop_of(state: ExecutionState, step: str, visit: int) -> LoopState:
    loop = state.visits[visit_id(step, visit)].loop
    assert loop is not None, (step, visit)
    return loop
