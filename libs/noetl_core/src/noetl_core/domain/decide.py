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

from noetl_core.domain.envelope import Envelope, ParentReference, Reference
from noetl_core.domain.errors import ReferenceNeeded, TemplateError, ToolError
from noetl_core.domain.events import (
    Again,
    AnyFact,
    CallDone,
    CallFailed,
    CallPartial,
    Chunk,
    CommandClaimed,
    CommandExpired,
    CommandIssued,
    CommandParked,
    Event,
    ExecutionCompleted,
    ExecutionFailed,
    ExecutionRetried,
    ExecutionStarted,
    Hop,
    LoopDone,
    LoopStarted,
    RetryCompleted,
    ShardEnqueued,
    SignalReceived,
    StepAborted,
    StepEntered,
    StepExited,
    StepFailed,
    type_name,
)
from noetl_core.domain.fold import fold, loop_of
from noetl_core.domain.ids import (
    CommandId,
    EventId,
    LoopId,
    RefId,
    StepName,
    parse_command_id,
    visit_id,
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
from noetl_core.domain.placement import targeted
from noetl_core.domain.playbook import Playbook, Step
from noetl_core.domain.retry import abort, circuit_delay, judged
from noetl_core.domain.route import (
    Outcome,
    is_admitted,
    leave,
    loop_collection,
    ready_barriers,
    template_failure,
)
from noetl_core.domain.snowflake import minted_at_ms
from noetl_core.domain.state import ExecutionState, OpenCommand, Signal, Visit

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
            return _all(_move_on(playbook, state, fact))
        case LoopStarted() as fact:
            return _advance(playbook, state, fact.step, fact.visit, event.event_id, known)
        case LoopDone() as fact:
            return _leave(playbook, state, fact, _loop_outcome(state, fact), known)
        case RetryCompleted() as fact:
            return _after_pages(playbook, state, fact, event.event_id, known)
        case CallPartial() as fact:
            return _all(_enter_with_chunk(state, fact))
        case CommandParked() | SignalReceived():
            return _all(_end_waits(playbook, state, event.event_id, known))
        case StepAborted() as fact:
            return (_fail(playbook, state, fact, fact.error, known),)
        case ExecutionStarted() as fact:
            entry = fact.entry or playbook.entry_step
            return (Decision(_enter(state, entry, given=fact.input)),)
        case ExecutionRetried() as fact:
            return _all(_enter_each(state, fact.entries))
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


def _enter(
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
            yield _enter(
                state, hop.step, ahead=ahead, parent_ref=parent_ref, given=hop.input, chunk=chunk
            )


def _enter_each(state: ExecutionState, steps: tuple[StepName, ...]) -> Iterator[StepEntered]:
    hops = tuple(Hop(step=step) for step in steps)
    return _enter_hops(state, hops, parent_ref=None)


def _enter_with_chunk(state: ExecutionState, fact: CallPartial) -> Iterator[StepEntered]:
    chunk = Chunk(step=fact.step, result=fact.result)
    return _enter_hops(state, fact.hops, parent_ref=_ref_to_follow(fact.result), chunk=chunk)


def _begin(
    playbook: Playbook, state: ExecutionState, fact: StepEntered, known: Known
) -> tuple[Decision, ...]:
    step = playbook.steps[fact.step]
    try:
        if not is_admitted(playbook, state, step, known, given=fact.input):
            return _leave(playbook, state, fact, _void(state, fact, "step.skipped"), known)
        if step.loop is not None:
            return (_begin_loop(playbook, state, step, fact, known),)
    except TemplateError as error:
        return (_fail(playbook, state, fact, template_failure(error), known),)
    if step.tool:
        return _issued(playbook, state, issue(step, fact.visit, Again(attempt=1)), known)
    return _leave(playbook, state, fact, _void(state, fact), known)


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
    collection = loop_collection(playbook, state, step, known, given=fact.input)
    if not isinstance(collection, list):
        return _fail(playbook, state, fact, _not_a_list(step, collection), known)
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
        return (Decision(_pages(step, fact, event_id)),)
    if fact.iter_index is not None:
        return _advance(playbook, state, fact.step, fact.visit, event_id, known)
    return _leave(playbook, state, fact, _call_outcome(state, fact), known)


def _pages(step: Step, fact: CallDone, event_id: EventId) -> RetryCompleted:
    rule = step.retry.on_success
    assert rule is not None, step.step
    sequence = fact.sequence or event_id
    return RetryCompleted(
        step=fact.step,
        visit=fact.visit,
        result=msgspec.structs.replace(
            fact.result, reference=Reference(ref_id=RefId(sequence), type="pages"), context={}
        ),
        sequence=sequence,
        pages=parse_command_id(fact.command_id).page,
        collect=rule.collect,
        merge_path=rule.merge_path,
        loop_id=fact.loop_id,
        iter_index=fact.iter_index,
    )


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


def _end_waits(
    playbook: Playbook, state: ExecutionState, event_id: EventId, known: Known
) -> Iterator[AnyFact]:
    """What a signal ends: the oldest wait for its name. A signal ends one, a wait takes one."""
    for signal in state.signals:
        for command_id, command in state.commands.items():
            if _waits_for(command, signal):
                fact = _ended_by(state, command_id, command, signal)
                yield judged(playbook, state, fact, event_id, known)
                return


def _waits_for(command: OpenCommand, signal: Signal) -> bool:
    parked = command.parked
    if parked is None or parked.signal != signal.name:
        return False
    return not parked.approvers or signal.by in parked.approvers


def _ended_by(
    state: ExecutionState, command_id: CommandId, command: OpenCommand, signal: Signal
) -> CallDone | CallFailed:
    assert command.worker_id is not None, command_id
    visit = state.visits[visit_id(command.step, command.visit)]
    reference = None if signal.result is None else signal.result.reference
    parent = ParentReference(ref_id=None if visit.parent_ref is None else RefId(visit.parent_ref))
    common: dict[str, Any] = {
        "step": command.step,
        "visit": command.visit,
        "command_id": command_id,
        "worker_id": command.worker_id,
        "attempt": command.attempt,
        "iter_index": command.index,
        "loop_id": None if visit.loop is None else visit.loop.loop_id,
        "signal_id": signal.signal_id,
    }
    if signal.approved:
        envelope = Envelope(status="ok", reference=reference, parent_ref=parent)
        return CallDone(**common, result=envelope)
    by = f" by {signal.by}" if signal.by else ""
    return CallFailed(
        **common,
        result=Envelope(status="error", reference=reference, parent_ref=parent),
        error=ToolError(kind="denied", message=f"`{signal.name}` was denied{by}"),
    )


def _move_on(
    playbook: Playbook, state: ExecutionState, fact: StepExited | StepFailed
) -> Iterator[AnyFact]:
    if isinstance(fact, StepFailed) and not fact.handled:
        yield ExecutionFailed(error=fact.error, step=fact.step, generation=state.generation)
        return
    parent_ref = _ref_to_follow(fact.result)
    yield from _enter_hops(state, fact.hops, parent_ref=parent_ref)
    for step in ready_barriers(playbook, state):
        tokens, given = state.arrivals[step], state.inputs.get(step)
        yield _enter(state, step, tokens=tokens, parent_ref=parent_ref, given=given)
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
        return _enter(state, StepName(final), parent_ref=parent_ref)
    return ExecutionCompleted(result=fact.result, generation=state.generation)


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
    return Outcome(
        envelope=Envelope(
            status=fact.status,
            reference=Reference(ref_id=RefId(fact.loop_id), type="eventlog"),
            parent_ref=_parent(state, fact),
            context={
                "stats.total": fact.total,
                "stats.success": fact.done,
                "stats.failed": fact.failed,
            },
        ),
        event_name=type_name(fact),
        error=None if fact.status == "ok" else _loop_error(state, fact),
        fanin={
            "status": fact.fanin,
            "done": fact.done,
            "failed": fact.failed,
            "total": fact.total,
        },
    )


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
    playbook: Playbook,
    state: ExecutionState,
    fact: StepEntered | StepAborted,
    error: ToolError,
    known: Known,
) -> Decision:
    outcome = Outcome(
        envelope=Envelope(status="error", parent_ref=_parent(state, fact)), error=error
    )
    return Decision(leave(playbook, state, fact.step, fact.visit, outcome, known))


def _void(state: ExecutionState, fact: StepEntered, event_name: str = "call.done") -> Outcome:
    envelope = Envelope(status="ok", parent_ref=_parent(state, fact))
    return Outcome(envelope=envelope, event_name=event_name)


_OfVisit = (
    StepEntered | StepAborted | CommandExpired | LoopDone | RetryCompleted | CallDone | CallFailed
)


def _leave(
    playbook: Playbook, state: ExecutionState, fact: _OfVisit, outcome: Outcome, known: Known
) -> tuple[Decision, ...]:
    return (Decision(leave(playbook, state, fact.step, fact.visit, outcome, known)),)


def _parent(
    state: ExecutionState, fact: StepEntered | StepAborted | CommandExpired | LoopDone
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
