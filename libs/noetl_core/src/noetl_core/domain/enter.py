"""How tokens come into steps: along arcs, through barriers, with a chunk, again after a retry."""

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from noetl_core.domain.envelope import Envelope
from noetl_core.domain.events import (
    AnyFact,
    CallPartial,
    Chunk,
    ExecutionCompleted,
    ExecutionFailed,
    ExecutionRetried,
    Given,
    Hop,
    StepEntered,
    StepExited,
    StepFailed,
)
from noetl_core.domain.ids import RefId, StepName
from noetl_core.domain.playbook import Playbook
from noetl_core.domain.route import ready_barriers
from noetl_core.domain.state import ExecutionState


def move_on(
    playbook: Playbook, state: ExecutionState, fact: StepExited | StepFailed
) -> Iterator[AnyFact]:
    if isinstance(fact, StepFailed) and not fact.handled:
        yield ExecutionFailed(error=fact.error, step=fact.step, generation=state.generation)
        return
    parent_ref = _ref_to_follow(fact.result)
    yield from _enter_hops(state, fact.hops, parent_ref=parent_ref)
    for step in ready_barriers(playbook, state):
        tokens, given = state.arrivals[step], state.inputs.get(step)
        yield enter(state, step, tokens=tokens, parent_ref=parent_ref, given=given)
    if not state.visits and not state.arrivals:
        yield _finish(playbook, state, fact, parent_ref)


def _finish(
    playbook: Playbook,
    state: ExecutionState,
    fact: StepExited | StepFailed,
    parent_ref: RefId | None,
) -> AnyFact:
    """Nothing is left to do but the final step, which runs once."""
    final = playbook.executor.spec.final_step
    if final is not None and final not in state.steps:
        return enter(state, StepName(final), parent_ref=parent_ref)
    return ExecutionCompleted(result=fact.result, generation=state.generation)


def _enter_hops(
    state: ExecutionState,
    hops: tuple[Hop, ...],
    *,
    parent_ref: RefId | None,
    chunk: Chunk | None = None,
) -> Iterator[StepEntered]:
    entered: dict[StepName, int] = {}
    for hop in hops:
        if not hop.barrier:
            ahead = entered.get(hop.step, 0)
            entered[hop.step] = ahead + 1
            yield enter(
                state, hop.step, ahead=ahead, parent_ref=parent_ref, given=hop.input, chunk=chunk
            )


def enter_again(state: ExecutionState, fact: ExecutionRetried) -> Iterator[StepEntered]:
    entered: dict[StepName, int] = {}
    for step, had in zip_longest(fact.entries, fact.given, fillvalue=Given()):
        assert not isinstance(step, Given), fact
        ahead = entered.get(step, 0)
        entered[step] = ahead + 1
        parent_ref = None if had.parent_ref is None else RefId(had.parent_ref)
        yield enter(
            state, step, ahead=ahead, parent_ref=parent_ref, given=had.input, chunk=had.chunk
        )


def enter_with_chunk(state: ExecutionState, fact: CallPartial) -> Iterator[StepEntered]:
    chunk = Chunk(step=fact.step, result=fact.result)
    return _enter_hops(state, fact.hops, parent_ref=_ref_to_follow(fact.result), chunk=chunk)


def enter(
    state: ExecutionState,
    step: StepName,
    *,
    tokens: int = 1,
    ahead: int = 0,
    parent_ref: RefId | None = None,
    given: dict[str, Any] | None = None,
    chunk: Chunk | None = None,
) -> StepEntered:
    """`ahead`: how many entries into this step were decided just now and are not folded yet."""
    seen = state.steps.get(step)
    return StepEntered(
        step=step,
        visit=(0 if seen is None else seen.visit) + 1 + ahead,
        tokens=tokens,
        parent_ref=parent_ref,
        input=given or {},
        chunk=chunk,
    )


def _ref_to_follow(result: Envelope) -> RefId | None:
    """What the next step comes after: this result or, where nothing was stored, the one before."""
    if result.reference is not None:
        return result.reference.ref_id
    return None if result.parent_ref is None else result.parent_ref.ref_id
