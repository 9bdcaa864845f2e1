"""decide: which facts follow from an event. Pure: the answer depends on its arguments alone.

    ExecutionStarted ─> StepEntered ─┬─> CommandIssued ─> (worker) ─> CallDone ──┬─> StepExited ─┐
                              ^      └─> LoopStarted ─> CommandIssued... LoopDone ┘               │
                              └───────────────────────────────────────────────────────────────────┤
                                                                    ExecutionCompleted | Failed <─┘

What one decision returns is recorded together, then each of it is decided in turn, depth first (see
`follow`), so a decision always sees everything that was decided before it. A value that is stored
elsewhere raises ReferenceNeeded: the caller loads it into `known` and asks again.
"""

from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec

from noetl_core.domain.enter import enter, enter_again, enter_with_chunk, move_on
from noetl_core.domain.envelope import Envelope
from noetl_core.domain.errors import ReferenceNeeded, TemplateError, ToolError
from noetl_core.domain.events import (
    Again,
    AnyFact,
    CallDone,
    CallFailed,
    CallPartial,
    CommandClaimed,
    CommandExpired,
    CommandIssued,
    CommandParked,
    Event,
    ExecutionRetried,
    ExecutionStarted,
    LoopDone,
    LoopStarted,
    RetryCompleted,
    ShardEnqueued,
    SignalReceived,
    StepAborted,
    StepEntered,
    StepExited,
    StepFailed,
)
from noetl_core.domain.fold import fold, loop_of
from noetl_core.domain.ids import (
    EventId,
    LoopId,
    StepName,
)
from noetl_core.domain.known import Known
from noetl_core.domain.loop import (
    advance_loop,
    go_on_with_loop,
    in_chunks,
    issue,
    start_cursor,
    start_loop,
)
from noetl_core.domain.outcome import (
    call_outcome,
    end_waits,
    loop_outcome,
    no_outcome,
    not_a_list,
    pages_collected,
    parent_of,
)
from noetl_core.domain.placement import targeted
from noetl_core.domain.playbook import Playbook, Step
from noetl_core.domain.retry import abort, circuit_delay, judged
from noetl_core.domain.route import (
    Outcome,
    is_admitted,
    leave,
    loop_collection,
    template_failure,
)
from noetl_core.domain.snowflake import minted_at_ms
from noetl_core.domain.state import ExecutionState

T = TypeVar("T")


class Decision(NamedTuple):
    """A fact that follows and, for a loop, the collection that must be stored with it."""

    fact: AnyFact
    collection: list[Any] | None = None


class Recorded(NamedTuple):
    event: Event
    collection: list[Any] | None


def decide(  # noqa: C901, PLR0911 - one case an event
    playbook: Playbook, state: ExecutionState, event: Event, known: Known
) -> tuple[Decision, ...]:
    if state.is_terminal:
        return ()
    match event.fact:  # the frequent ones first
        case CommandIssued() | CommandClaimed() | ShardEnqueued():
            return ()
        case CallDone() | CallFailed() | CommandExpired() as fact:
            return _after_attempt(playbook, state, fact, event.event_id, known)
        case StepEntered() as fact:
            return _begin(playbook, state, fact, known)
        case StepExited() | StepFailed() as fact:
            return _all(move_on(playbook, state, fact))
        case LoopStarted() as fact:
            return _advance(playbook, state, fact.step, fact.visit, event.event_id, known)
        case LoopDone() as fact:
            return _leave(playbook, state, fact, loop_outcome(state, fact), known)
        case RetryCompleted() as fact:
            return _after_pages(playbook, state, fact, event.event_id, known)
        case CallPartial() as fact:
            return _all(enter_with_chunk(state, fact))
        case CommandParked() | SignalReceived():
            return _all(end_waits(playbook, state, event.event_id, known))
        case StepAborted() as fact:
            return (_fail(playbook, state, fact, fact.error, known),)
        case ExecutionStarted() as fact:
            entry = fact.entry or playbook.entry_step
            return (Decision(enter(state, entry, given=fact.input)),)
        case ExecutionRetried() as fact:
            return _all(enter_again(state, fact))
        case _:
            return ()


def _all(facts: Iterator[AnyFact]) -> tuple[Decision, ...]:
    return tuple(Decision(fact) for fact in facts)


def follow(
    playbook: Playbook,
    state: ExecutionState,
    fact: AnyFact,
    known: Known,
    ids: Iterator[int],
) -> Iterator[Recorded | ReferenceNeeded]:
    """Fold a new fact and everything that follows from it, in the order of the log.

    All that one decision gave is folded before any of it is decided: when two arcs are taken, both
    steps are entered before the first of them goes on, so what it reaches knows of the second, and
    an execution that fails on the first branch has nothing left to record. A ReferenceNeeded that
    is yielded must be loaded into `known` before the next item is asked for.
    """
    event_id = EventId(next(ids))
    known.previous = (
        fact.worker_id if isinstance(fact, CallDone | CallFailed | CallPartial) else None
    )
    fact = yield from _asking(lambda: judged(playbook, state, fact, event_id, known))
    undecided: list[Event] = []
    decisions: tuple[Decision, ...] = (Decision(fact),)
    while True:
        events = []
        for decision in decisions:
            event = Event(
                execution_id=state.execution_id,
                event_id=event_id,
                fact=_placed(decision.fact, event_id),
            )
            fold(state, event)
            events.append(event)
            yield Recorded(event, decision.collection)
            event_id = EventId(next(ids))
        undecided.extend(reversed(events))
        if not undecided:
            return
        event = undecided.pop()
        decisions = yield from _asking(
            lambda event=event: decide(playbook, state, event, known)  # type: ignore[misc]
        )


def _asking(answer: Callable[[], T]) -> Generator[ReferenceNeeded, None, T]:
    """Ask until nothing is missing. Every round has one thing more at hand."""
    while True:
        try:
            return answer()
        except ReferenceNeeded as needed:
            yield needed


def _placed(fact: AnyFact, event_id: EventId) -> AnyFact:
    """A loop is called by the id of the event that starts it, and so is what it stores."""
    if not isinstance(fact, LoopStarted):
        return fact
    reference = "" if fact.is_cursor else f"manifest/{fact.collection_id or event_id}"
    return msgspec.structs.replace(fact, loop_id=LoopId(event_id), collection_ref=reference)


def _begin(
    playbook: Playbook, state: ExecutionState, fact: StepEntered, known: Known
) -> tuple[Decision, ...]:
    step = playbook.steps[fact.step]
    try:
        if not is_admitted(playbook, state, step, known, given=fact.input, chunk=fact.chunk):
            return _leave(playbook, state, fact, no_outcome(state, fact, "step.skipped"), known)
        if step.loop is not None:
            return (_begin_loop(playbook, state, step, fact, known),)
    except TemplateError as error:
        return (_fail(playbook, state, fact, template_failure(error), known),)
    if step.tool:
        return _issued(playbook, state, issue(step, fact.visit, Again(attempt=1)), known)
    return _leave(playbook, state, fact, no_outcome(state, fact), known)


def _begin_loop(
    playbook: Playbook, state: ExecutionState, step: Step, fact: StepEntered, known: Known
) -> Decision:
    assert step.loop is not None, step.step
    if step.loop.cursor is not None:
        return Decision(start_cursor(step, fact.visit))
    before = state.steps[fact.step]
    if fact.step in state.redo and before.loop_id is not None:
        undone = known.left_undone(before.loop_id)
        return Decision(go_on_with_loop(step, fact.visit, before, undone), undone)
    collection = loop_collection(playbook, state, step, known, given=fact.input, chunk=fact.chunk)
    if not isinstance(collection, list):
        return _fail(playbook, state, fact, not_a_list(step, collection), known)
    items = in_chunks(step.loop, collection)
    return Decision(start_loop(step, fact.visit, items), items)


def _after_attempt(
    playbook: Playbook,
    state: ExecutionState,
    fact: CallDone | CallFailed | CommandExpired,
    event_id: EventId,
    known: Known,
) -> tuple[Decision, ...]:
    step = playbook.steps[fact.step]
    if fact.again is not None:
        following = issue(
            step,
            fact.visit,
            fact.again,
            index=fact.iter_index,
            loop_id=fact.loop_id,
            parent_event_id=event_id,
        )
        return _issued(playbook, state, following, known, after=fact)
    if isinstance(fact, CallDone) and step.retry.on_success is not None:
        return (Decision(pages_collected(step, fact, event_id)),)
    if fact.iter_index is not None:
        return _advance(playbook, state, fact.step, fact.visit, event_id, known)
    return _leave(playbook, state, fact, call_outcome(state, fact), known)


def _after_pages(
    playbook: Playbook,
    state: ExecutionState,
    fact: RetryCompleted,
    event_id: EventId,
    known: Known,
) -> tuple[Decision, ...]:
    if fact.iter_index is not None:
        return _advance(playbook, state, fact.step, fact.visit, event_id, known)
    outcome = Outcome(envelope=fact.result, event_name="retry.completed")
    return _leave(playbook, state, fact, outcome, known)


def _advance(
    playbook: Playbook,
    state: ExecutionState,
    step: StepName,
    visit: int,
    event_id: EventId,
    known: Known,
) -> tuple[Decision, ...]:
    loop = loop_of(state, step, visit)
    delay_s = circuit_delay(state, step, minted_at_ms(event_id))
    facts = advance_loop(playbook.steps[step], visit, loop, known, delay_s=delay_s)
    if playbook.steps[step].spec.placement is None:
        return _all(facts)
    decisions: list[Decision] = []
    for fact in facts:
        if not isinstance(fact, CommandIssued):
            decisions.append(Decision(fact))
            continue
        (decision,) = _issued(playbook, state, fact, known)
        if isinstance(decision.fact, StepAborted):
            return (decision,)  # nothing that was to be issued with it is
        decisions.append(decision)
    return tuple(decisions)


def _issued(
    playbook: Playbook,
    state: ExecutionState,
    issued: CommandIssued,
    known: Known,
    *,
    after: AnyFact | None = None,
) -> tuple[Decision]:
    """The command, meant for the worker that the step's placement asks for."""
    if playbook.steps[issued.step].spec.placement is None:
        return (Decision(issued),)
    try:
        return (Decision(targeted(playbook, state, issued, known, after=after)),)
    except TemplateError as error:
        return (Decision(abort(state, issued.step, issued.visit, template_failure(error))),)


def _fail(
    playbook: Playbook,
    state: ExecutionState,
    fact: StepEntered | StepAborted,
    error: ToolError,
    known: Known,
) -> Decision:
    outcome = Outcome(
        envelope=Envelope(status="error", parent_ref=parent_of(state, fact)), error=error
    )
    return Decision(leave(playbook, state, fact.step, fact.visit, outcome, known))


_OfVisit = (
    StepEntered | StepAborted | CommandExpired | LoopDone | RetryCompleted | CallDone | CallFailed
)


def _leave(
    playbook: Playbook, state: ExecutionState, fact: _OfVisit, outcome: Outcome, known: Known
) -> tuple[Decision, ...]:
    return (Decision(leave(playbook, state, fact.step, fact.visit, outcome, known)),)
