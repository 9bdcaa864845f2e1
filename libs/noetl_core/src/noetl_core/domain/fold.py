"""fold: what is true after an event. Pure: no template, no guard, no clock, no playbook.

An event at or before the state's watermark changes nothing, so folding any prefix twice is folding
it once. The state it is given is updated in place and returned: nobody else holds it, and a copy
per event would make a loop of a thousand items cost a thousand copies.
"""

from collections.abc import Iterable
from typing import assert_never

from noetl_core.domain.ctx import merge_ctx
from noetl_core.domain.events import (
    AnyFact,
    CallDone,
    CallFailed,
    CallPartial,
    CheckpointCommitted,
    CommandClaimed,
    CommandExpired,
    CommandIssued,
    CommandParked,
    Event,
    ExecutionCancelled,
    ExecutionCompleted,
    ExecutionFailed,
    ExecutionPaused,
    ExecutionResumed,
    ExecutionRetried,
    ExecutionStarted,
    FanoutStarted,
    Given,
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
    StepSkipped,
)
from noetl_core.domain.ids import CommandId, EventId, ExecutionId, LoopId, StepName, visit_id
from noetl_core.domain.snowflake import minted_at_ms
from noetl_core.domain.state import (
    SIGNALS_MAX,
    ExecutionState,
    ExecutionStatus,
    LoopState,
    OpenCommand,
    Parked,
    Signal,
    StepState,
    StepStatus,
    Visit,
)


def fold(state: ExecutionState, event: Event) -> ExecutionState:
    if event.event_id > state.last_event_id:
        _apply(state, event.fact, event.event_id)
        state.last_event_id = event.event_id
    return state


def _apply(  # noqa: C901, PLR0912, PLR0915 - one case an event
    state: ExecutionState, fact: AnyFact, event_id: EventId
) -> None:
    match fact:
        case CommandIssued():
            _issue(state, fact)
        case CommandClaimed():
            state.commands[fact.command_id].worker_id = fact.worker_id
        case CallDone():
            merge_ctx(state.ctx, fact.ctx)
            _close(state, fact, done=0 if fact.again else 1)
            _use_up(state, fact)
            _close_circuit(state, fact)
        case CallFailed():
            merge_ctx(state.ctx, fact.ctx)
            _close(state, fact, failed=0 if fact.again else 1)
            _use_up(state, fact)
            _watch(state, fact, event_id)
        case CommandExpired():
            # A log from before `again` says by its error alone that another attempt followed.
            goes_on = fact.again is not None or fact.error.retryable
            _close(state, fact, failed=0 if goes_on else 1)
        case CommandParked():
            _park(state, fact)
        case CallPartial():
            state.commands[fact.command_id].chunks = fact.chunk_index + 1
            merge_ctx(state.ctx, fact.ctx)
            _send_off(state, fact.hops)
        case StepEntered():
            _enter(state, fact)
        case LoopStarted():
            _start_loop(state, fact, LoopId(event_id))
        case StepExited() | StepFailed():
            _leave(state, fact)
        case StepAborted():
            state.orphans = _children(state, fact.commands)
            for command_id in fact.commands:
                state.commands.pop(command_id, None)
        case SignalReceived():
            _keep_signal(state, fact)
        case ExecutionStarted():
            _start(state, fact)
        case ExecutionPaused():
            state.status, state.pauses = "PAUSED", fact.number
        case ExecutionResumed():
            state.status = "RUNNING"
        case ExecutionRetried():
            _retry(state, fact)
        case ExecutionCompleted():
            _end(state, "COMPLETED")
        case ExecutionFailed():
            state.error = fact.error
            _end(state, "FAILED")
        case ExecutionCancelled():
            _end(state, "CANCELLED")
        case CheckpointCommitted():
            state.epoch = fact.barrier
        case LoopDone() | ShardEnqueued() | RetryCompleted():
            pass  # what they say is in the state already; they are there for whoever reads the log
        case _:
            assert_never(fact)


def _start(state: ExecutionState, fact: ExecutionStarted) -> None:
    state.catalog_id, state.payload = fact.catalog_id, fact.result
    state.status = "RUNNING"
    state.parent_execution_id = fact.parent_execution_id
    state.parent_command_id = fact.parent_command_id
    state.return_step, state.depth = fact.return_step, fact.depth
    state.iter_parent = fact.iter_parent
    state.ctx = dict(fact.ctx)
    for name, result in fact.steps.items():
        state.steps[name] = StepState(status="COMPLETED", result=result)


def _issue(state: ExecutionState, fact: CommandIssued) -> None:
    state.commands[fact.command_id] = OpenCommand(
        step=fact.step,
        visit=fact.visit,
        attempt=fact.attempt,
        index=fact.iter_index,
        page=fact.page,
        failures=fact.failures,
        given_back=fact.given_back,
        call=fact.call,
        sequence=fact.sequence,
        chunks=fact.chunks,
    )
    if fact.iter_index is not None:
        loop = loop_of(state, fact.step, fact.visit)
        loop.in_flight += 1
        if fact.attempt == 1 and fact.page == 1:
            loop.next_index += 1


def _close(
    state: ExecutionState,
    fact: CallDone | CallFailed | CommandExpired,
    *,
    done: int = 0,
    failed: int = 0,
) -> None:
    command = state.commands.pop(fact.command_id)
    if isinstance(fact, CallFailed):
        child = None if command.parked is None else command.parked.child
        state.orphans = [] if child is None or fact.error.kind != "timeout" else [child]
    if fact.iter_index is not None:
        loop = loop_of(state, fact.step, fact.visit)
        loop.in_flight -= 1
        if loop.is_cursor and done and isinstance(fact, CallDone) and not fact.frame_rows:
            done, loop.slots_ended = 0, loop.slots_ended + 1
        loop.done += done
        loop.failed += failed
        if failed and loop.is_cursor:
            loop.slots_ended += 1
        if failed and loop.first_error is None and not isinstance(fact, CallDone):
            loop.first_error = fact.error
        step = state.steps[fact.step]
        if step.visit == fact.visit:
            step.done, step.failed = loop.base_done + loop.done, loop.failed


def _watch(state: ExecutionState, fact: CallFailed, event_id: EventId) -> None:
    """The failures that a circuit breaker looks at, the latest last."""
    again = fact.again
    if again is None or not again.failures_watched:
        return
    step = state.steps[fact.step]
    step.failed_at_ms = [*step.failed_at_ms, minted_at_ms(event_id)][-again.failures_watched :]
    step.open_until_ms = max(step.open_until_ms, again.open_until_ms)


def _close_circuit(state: ExecutionState, fact: CallDone) -> None:
    step = state.steps[fact.step]
    if step.failed_at_ms:
        step.failed_at_ms, step.open_until_ms = [], 0


def _use_up(state: ExecutionState, fact: CallDone | CallFailed) -> None:
    """A signal ends one wait, whatever its answer was."""
    if fact.signal_id is not None:
        state.signals = [s for s in state.signals if s.signal_id != fact.signal_id]


def _park(state: ExecutionState, fact: CommandParked) -> None:
    command = state.commands[fact.command_id]
    command.worker_id = fact.worker_id
    command.parked = Parked(
        kind=fact.kind,
        child=fact.child,
        signal=fact.signal,
        until_ms=fact.until_ms,
        approvers=tuple(fact.details.get("approvers", ())),
    )


def _children(state: ExecutionState, commands: Iterable[CommandId]) -> list[ExecutionId]:
    waiting = (state.commands[c].parked for c in commands if c in state.commands)
    return [parked.child for parked in waiting if parked is not None and parked.child is not None]


def _keep_signal(state: ExecutionState, fact: SignalReceived) -> None:
    signal = Signal(
        signal_id=fact.signal_id,
        name=fact.name,
        approved=fact.approved,
        by=fact.by,
        result=fact.result,
    )
    state.signals = [*state.signals, signal][-SIGNALS_MAX:]
    state.signals_seen = [*state.signals_seen, fact.signal_id][-SIGNALS_MAX:]


def _enter(state: ExecutionState, fact: StepEntered) -> None:
    waiting = state.arrivals.pop(fact.step, 0) - fact.tokens
    if waiting > 0:
        state.arrivals[fact.step] = waiting
    else:
        state.inputs.pop(fact.step, None)
    state.visits[visit_id(fact.step, fact.visit)] = Visit(
        step=fact.step,
        visit=fact.visit,
        parent_ref=fact.parent_ref,
        input=fact.input,
        chunk=fact.chunk,
    )
    step = state.steps.setdefault(fact.step, StepState())
    step.visit, step.status = fact.visit, "RUNNING"
    step.given = Given(parent_ref=fact.parent_ref, input=fact.input, chunk=fact.chunk)
    if fact.step not in state.redo:
        step.loop_id = step.collection_id = None


def _start_loop(state: ExecutionState, fact: LoopStarted, loop_id: LoopId) -> None:
    state.visits[visit_id(fact.step, fact.visit)].loop = LoopState(
        loop_id=loop_id,
        total=fact.total,
        part_size=fact.part_size,
        parts=fact.parts,
        max_in_flight=fact.max_in_flight,
        fail_fast=fact.fail_fast,
        is_cursor=fact.is_cursor,
        base=fact.base,
        base_done=fact.base_done,
        collection_id=fact.collection_id,
    )
    if isinstance(fact, FanoutStarted):
        loop = loop_of(state, fact.step, fact.visit)
        loop.is_fanout = True
        loop.shard_retries_max = fact.shard_retries_max
        loop.allow_partial = fact.allow_partial
    step = state.steps[fact.step]
    if step.visit == fact.visit:
        step.loop_id, step.collection_id = loop_id, fact.collection_id or loop_id
        step.total, step.done, step.failed = fact.base_done + fact.total, fact.base_done, 0
    state.redo = [name for name in state.redo if name != fact.step]


def _leave(state: ExecutionState, fact: StepExited | StepFailed) -> None:
    visit = state.visits.pop(visit_id(fact.step, fact.visit))
    if isinstance(fact, StepFailed) and not fact.handled:
        _interrupt(state, visit)  # the execution fails with it
    step = state.steps[fact.step]
    step.result = fact.result
    step.error = fact.error if isinstance(fact, StepFailed) else None
    if step.visit == fact.visit:
        step.status = _LEFT_AS.get(type(fact), "COMPLETED")
    state.redo = [name for name in state.redo if name != fact.step]
    merge_ctx(state.ctx, fact.ctx)
    _send_off(state, fact.hops)


_LEFT_AS: dict[type, StepStatus] = {StepFailed: "FAILED", StepSkipped: "SKIPPED"}


def _send_off(state: ExecutionState, hops: tuple[Hop, ...]) -> None:
    for hop in hops:
        state.arrivals[hop.step] = state.arrivals.get(hop.step, 0) + 1
        if hop.barrier and hop.input:
            state.inputs[hop.step] = {**state.inputs.get(hop.step, {}), **hop.input}


def _end(state: ExecutionState, status: ExecutionStatus) -> None:
    state.status = status
    # A state that came back from the database has its commands in another order: jsonb sorts keys.
    state.orphans = sorted(_children(state, state.commands))
    state.held_back = dict(state.arrivals)
    for visit in state.visits.values():
        state.steps[visit.step].status = "CANCELLED"
        _interrupt(state, visit)
    state.visits.clear()
    state.arrivals.clear()
    state.commands.clear()
    state.signals = []


def _interrupt(state: ExecutionState, visit: Visit) -> None:
    given = Given(parent_ref=visit.parent_ref, input=visit.input, chunk=visit.chunk)
    state.interrupted[visit.step] = [*state.interrupted.get(visit.step, ()), given]


def _retry(state: ExecutionState, fact: ExecutionRetried) -> None:
    """Tokens that waited at a barrier wait there again; the others are on their way in again."""
    state.status, state.error, state.generation = "RUNNING", None, fact.generation
    state.arrivals = dict(state.held_back)
    for name in fact.entries:
        state.arrivals[name] = state.arrivals.get(name, 0) + 1
    if fact.items == "failed":
        state.redo = [n for n in dict.fromkeys(fact.entries) if _has_looped(state, n)]
    state.interrupted, state.held_back = {}, {}


def _has_looped(state: ExecutionState, name: StepName) -> bool:
    step = state.steps.get(name)
    return step is not None and step.loop_id is not None


def loop_of(state: ExecutionState, step: str, visit: int) -> LoopState:
    loop = state.visits[visit_id(step, visit)].loop
    assert loop is not None, (step, visit)
    return loop
