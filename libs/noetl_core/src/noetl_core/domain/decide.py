"""decide: which facts follow from an event. Pure: the answer depends on its arguments alone.

    ExecutionStarted ─> StepEntered ─┬─> CommandIssued ─> (worker) ─> CallDone ──┬─> StepExited ─┐
                              ^      └─> LoopStarted ─> CommandIssued... LoopDone ┘               │
                              └───────────────────────────────────────────────────────────────────┤
                                                                    ExecutionCompleted | Failed <─┘

What one decision returns is recorded together, then each of it is decided in turn, depth first (see
`follow`), so a decision always sees everything that was decided before it. A value that is stored
elsewhere raises ReferenceNeeded: the caller loads it into `known` and asks again.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from noetl_core.domain.envelope import Envelope, ParentReference, Reference
from noetl_core.domain.errors import ReferenceNeeded, TemplateError, ToolError
from noetl_core.domain.events import (
    AnyFact,
    CallDone,
    CallFailed,
    CommandClaimed,
    CommandExpired,
    CommandIssued,
    Event,
    ExecutionCompleted,
    ExecutionFailed,
    ExecutionStarted,
    LoopDone,
    LoopStarted,
    StepEntered,
    StepExited,
    StepFailed,
)
from noetl_core.domain.fold import fold, loop_of
from noetl_core.domain.ids import EventId, RefId, StepName, visit_id
from noetl_core.domain.known import Known
from noetl_core.domain.loop import advance_loop, issue, start_loop
from noetl_core.domain.playbook import Playbook, Step
from noetl_core.domain.route import (
    Outcome,
    leave,
    loop_collection,
    ready_barriers,
    template_failure,
)
from noetl_core.domain.state import ExecutionState, Visit


class Decision(NamedTuple):
    """A fact that follows and, for a loop, the collection that must be stored with it."""

    fact: AnyFact
    collection: list[Any] | None = None


class Recorded(NamedTuple):
    event: Event
    collection: list[Any] | None


def decide(
    playbook: Playbook, state: ExecutionState, event: Event, known: Known
) -> tuple[Decision, ...]:
    if state.is_terminal:
        return ()
    match event.fact:  # the frequent ones first
        case CommandIssued() | CommandClaimed():
            return ()
        case CallDone() | CallFailed() | CommandExpired() as fact:
            return _after_attempt(playbook, state, fact, known)
        case StepEntered() as fact:
            return _begin(playbook, state, fact, known)
        case StepExited() | StepFailed() as fact:
            return tuple(Decision(follower) for follower in _move_on(playbook, state, fact))
        case LoopStarted() as fact:
            return _advance(playbook, state, fact.step, fact.visit)
        case LoopDone() as fact:
            outcome = _loop_outcome(state, fact)
            return (Decision(leave(playbook, state, fact.step, fact.visit, outcome, known)),)
        case ExecutionStarted():
            return (Decision(_enter(state, playbook.entry_step)),)
        case _:
            return ()


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
    decisions: tuple[Decision, ...] = (Decision(fact),)
    undecided: list[Event] = []
    while True:
        events = []
        for decision in decisions:
            event = Event(
                execution_id=state.execution_id, event_id=EventId(next(ids)), fact=decision.fact
            )
            fold(state, event)
            events.append(event)
            yield Recorded(event, decision.collection)
        undecided.extend(reversed(events))
        if not undecided:
            return
        event = undecided.pop()
        while True:
            try:
                decisions = decide(playbook, state, event, known)
                break
            except ReferenceNeeded as needed:
                yield needed


def _enter(
    state: ExecutionState,
    step: StepName,
    *,
    tokens: int = 1,
    ahead: int = 0,
    parent_ref: RefId | None = None,
) -> StepEntered:
    """`ahead`: how many entries into this step were decided just now and are not folded yet."""
    seen = state.steps.get(step)
    return StepEntered(
        step=step,
        visit=(0 if seen is None else seen.visit) + 1 + ahead,
        tokens=tokens,
        parent_ref=parent_ref,
    )


def _begin(
    playbook: Playbook, state: ExecutionState, fact: StepEntered, known: Known
) -> tuple[Decision, ...]:
    step = playbook.steps[fact.step]
    if step.loop is not None:
        try:
            collection = loop_collection(playbook, state, step, known)
        except TemplateError as error:
            return (_fail(playbook, state, fact, template_failure(error), known),)
        if not isinstance(collection, list):
            return (_fail(playbook, state, fact, _not_a_list(step, collection), known),)
        return (Decision(start_loop(step, fact.visit, collection), collection),)
    if step.tool:
        return (Decision(issue(step, fact.visit)),)
    outcome = Outcome(envelope=Envelope(status="ok", parent_ref=_parent(state, fact)))
    return (Decision(leave(playbook, state, fact.step, fact.visit, outcome, known)),)


def _after_attempt(
    playbook: Playbook,
    state: ExecutionState,
    fact: CallDone | CallFailed | CommandExpired,
    known: Known,
) -> tuple[Decision, ...]:
    step = playbook.steps[fact.step]
    if isinstance(fact, CommandExpired) and not fact.final:
        again = issue(
            step,
            fact.visit,
            index=fact.iter_index,
            loop_id=fact.loop_id,
            attempt=fact.attempt + 1,
        )
        return (Decision(again),)
    if fact.iter_index is not None:
        return _advance(playbook, state, fact.step, fact.visit)
    outcome = _call_outcome(state, fact)
    return (Decision(leave(playbook, state, fact.step, fact.visit, outcome, known)),)


def _advance(
    playbook: Playbook, state: ExecutionState, step: StepName, visit: int
) -> tuple[Decision, ...]:
    loop = loop_of(state, step, visit)
    return tuple(Decision(f) for f in advance_loop(playbook.steps[step], visit, loop))


def _move_on(
    playbook: Playbook, state: ExecutionState, fact: StepExited | StepFailed
) -> Iterator[AnyFact]:
    if isinstance(fact, StepFailed) and not fact.handled:
        yield ExecutionFailed(error=fact.error, step=fact.step)
        return
    parent_ref = _ref_to_follow(fact.result)
    entered: dict[StepName, int] = {}
    for hop in fact.hops:
        if not hop.barrier:
            ahead = entered.get(hop.step, 0)
            entered[hop.step] = ahead + 1
            yield _enter(state, hop.step, ahead=ahead, parent_ref=parent_ref)
    for step in ready_barriers(playbook, state):
        yield _enter(state, step, tokens=state.arrivals[step], parent_ref=parent_ref)
    if not state.visits and not state.arrivals:
        yield ExecutionCompleted(result=fact.result)


def _ref_to_follow(result: Envelope) -> RefId | None:
    """What the next step comes after: this result or, where nothing was stored, the one before."""
    if result.reference is not None:
        return result.reference.ref_id
    return None if result.parent_ref is None else result.parent_ref.ref_id


def _call_outcome(state: ExecutionState, fact: CallDone | CallFailed | CommandExpired) -> Outcome:
    if isinstance(fact, CommandExpired):
        envelope = Envelope(status="error", parent_ref=_parent(state, fact))
        return Outcome(envelope=envelope, error=fact.error)
    error = fact.error if isinstance(fact, CallFailed) else None
    return Outcome(envelope=fact.result, error=error)


def _loop_outcome(state: ExecutionState, fact: LoopDone) -> Outcome:
    envelope = Envelope(
        status=fact.status,
        reference=Reference(ref_id=RefId(fact.loop_id), type="eventlog"),
        parent_ref=_parent(state, fact),
        context={
            "stats.total": fact.total,
            "stats.success": fact.done,
            "stats.failed": fact.failed,
        },
    )
    if fact.status == "ok":
        return Outcome(envelope=envelope, event_name="loop.done")
    return Outcome(envelope=envelope, event_name="loop.done", error=_loop_error(state, fact))


def _loop_error(state: ExecutionState, fact: LoopDone) -> ToolError:
    message = f"{fact.failed} of {fact.total} iterations failed"
    first = loop_of(state, fact.step, fact.visit).first_error
    if first is None:
        return ToolError(kind="loop_failed", message=message)
    return ToolError(
        kind="loop_failed",
        message=f"{message}; the first: {first.message}",
        details={"first": {"kind": first.kind, "message": first.message}},
    )


def _fail(
    playbook: Playbook, state: ExecutionState, fact: StepEntered, error: ToolError, known: Known
) -> Decision:
    outcome = Outcome(
        envelope=Envelope(status="error", parent_ref=_parent(state, fact)), error=error
    )
    return Decision(leave(playbook, state, fact.step, fact.visit, outcome, known))


def _parent(
    state: ExecutionState, fact: StepEntered | CommandExpired | LoopDone
) -> ParentReference:
    visit: Visit = state.visits[visit_id(fact.step, fact.visit)]
    return ParentReference(ref_id=None if visit.parent_ref is None else RefId(visit.parent_ref))


def _not_a_list(step: Step, collection: object) -> ToolError:
    return ToolError(
        kind="loop_collection",
        message=(
            f"`loop.in` of step {step.step!r} must give a list, "
            f"but it gave a {type(collection).__name__}"
        ),
    )
