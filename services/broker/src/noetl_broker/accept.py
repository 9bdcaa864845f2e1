"""Which fact, if any, follows from a message. Pure.

The state of an execution is exact, because its shard has one writer. So it alone tells a new
message from one that came again: a command that is not open has ended, an execution that has a
playbook was started. Everything that is not new gives None and is dropped.
"""

from typing import Any, assert_never

import msgspec

from noetl_core.domain.ctx import as_recorded, compose
from noetl_core.domain.envelope import CONTEXT_BYTES_MAX, Envelope, ParentReference, Reference
from noetl_core.domain.errors import ToolError
from noetl_core.domain.events import (
    AnyFact,
    CallDone,
    CallFailed,
    CallPartial,
    CheckpointCommitted,
    CommandClaimed,
    CommandExpired,
    CommandParked,
    ExecutionCancelled,
    ExecutionFailed,
    ExecutionPaused,
    ExecutionResumed,
    ExecutionRetried,
    ExecutionStarted,
    SignalReceived,
)
from noetl_core.domain.ids import (
    CommandId,
    EpochId,
    EventId,
    ExecutionId,
    LoopId,
    RefId,
    StepName,
    visit_id,
)
from noetl_core.domain.retry import abort, after_loss
from noetl_core.domain.state import ExecutionState, OpenCommand, Parked
from noetl_core.domain.timers import EXECUTION_TIMER, parse_timer
from noetl_core.wire import messages
from noetl_core.wire.messages import (
    Cancel,
    ChildEnded,
    Claimed,
    Done,
    Due,
    Expired,
    Failed,
    Partial,
    Pause,
    Resume,
    Retry,
    Start,
    Stored,
)

COMMAND_ATTEMPTS_MAX = 5
"""How often a command may be lost (a worker died under it) before it counts as failed."""

DEPTH_MAX = 32
"""How deep playbooks may call each other: more is a recursion that never ends."""

ExecutionMessage = (
    Start
    | Cancel
    | Pause
    | Resume
    | Retry
    | messages.Signal
    | Due
    | Claimed
    | messages.Parked
    | ChildEnded
    | Partial
    | Done
    | Failed
    | Expired
)


def accept(  # noqa: C901, PLR0911, PLR0912 - one case a message
    state: ExecutionState, message: ExecutionMessage, event_id: EventId
) -> AnyFact | None:
    """`event_id` is the id the fact will have: a result is referred to by it."""
    match message:
        case Claimed():
            return _claimed(state, message)
        case Done() | Failed():
            return _ended(state, message, event_id)
        case Expired():
            return expire(state, message.command_id, message.reason)
        case Start():
            return _started(state, message, event_id)
        case messages.Parked():
            return _parked(state, message, event_id)
        case ChildEnded():
            return _child_ended(state, message)
        case Partial():
            return _partial(state, message, event_id)
        case Due():
            return _due(state, message)
        case messages.Signal():
            return _signal(state, message, event_id)
        case Cancel():
            if state.is_open:
                reason = as_recorded(message.reason)
                return ExecutionCancelled(reason=reason, generation=state.generation)
            return None
        case Pause():
            if state.status == "RUNNING":
                reason = as_recorded(message.reason)
                return ExecutionPaused(number=state.pauses + 1, reason=reason)
            return None
        case Resume():
            if state.status == "PAUSED":
                return ExecutionResumed(number=state.pauses)
            return None
        case Retry():
            return _retried(state, message)
        case _:
            assert_never(message)


def checkpoint(state: ExecutionState, epoch: EpochId) -> CheckpointCommitted | None:
    if not state.is_open or epoch <= state.epoch:
        return None
    return CheckpointCommitted(barrier=epoch)


def expire(state: ExecutionState, command_id: CommandId, reason: str) -> CommandExpired | None:
    command = state.commands.get(command_id)
    if command is None or command.parked is not None:
        return None
    losses = command.attempt - command.failures
    again = None if losses >= COMMAND_ATTEMPTS_MAX else after_loss(command)
    return CommandExpired(
        step=command.step,
        visit=command.visit,
        command_id=command_id,
        attempt=command.attempt,
        iter_index=command.index,
        loop_id=_loop_id(state, command),
        again=again,
        error=ToolError(kind="lost", message=as_recorded(reason), retryable=again is not None),
    )


def _started(state: ExecutionState, message: Start, event_id: EventId) -> ExecutionStarted | None:
    if state.status != "PENDING":
        return None
    envelope = None
    if message.payload is not None:
        envelope = Envelope(status="ok", reference=_reference(message.payload, event_id))
    inherited: dict[str, Any] = {}
    if message.parent is not None:
        inherited = {
            "parent_execution_id": message.parent.execution_id,
            "parent_command_id": message.parent.command_id,
            "return_step": message.parent.return_step,
            "depth": message.parent.depth,
            "iter_parent": as_recorded(message.parent.iterator),
        }
    if message.fork is not None:
        inherited |= {
            "origin": message.fork.origin,
            "entry": message.fork.entry,
            "input": as_recorded(message.fork.input),
            "ctx": as_recorded(message.fork.ctx),
            "steps": message.fork.steps,
        }
    return ExecutionStarted(
        catalog_id=message.catalog_id,
        path=message.path,
        version=message.version,
        result=envelope,
        **inherited,
    )


def _retried(state: ExecutionState, message: Retry) -> ExecutionRetried | None:
    """From a step that was asked for, else from everything that was under way at the end."""
    if not state.is_terminal:
        return None
    if message.step is not None:
        entries: tuple[StepName, ...] = (message.step,)
        if message.step not in state.steps:
            return None
    elif state.status == "COMPLETED":
        return None
    else:
        entries = tuple(n for n, count in sorted(state.interrupted.items()) for _ in range(count))
    if not entries and not state.held_back:
        return None
    return ExecutionRetried(generation=state.generation + 1, entries=entries, items=message.items)


def _claimed(state: ExecutionState, message: Claimed) -> CommandClaimed | None:
    command = state.commands.get(message.command_id)
    if command is None or command.worker_id is not None:
        return None
    return CommandClaimed(worker_id=message.worker_id, **_place(state, message.command_id, command))


def _parked(
    state: ExecutionState, message: messages.Parked, event_id: EventId
) -> CommandParked | CallFailed | None:
    """The child's id is the id of this event: known before it is started, and nobody else's."""
    command = state.commands.get(message.command_id)
    if command is None or command.parked is not None:
        return None
    place = _place(state, message.command_id, command)
    if message.kind == "playbook" and state.depth + 1 > DEPTH_MAX:
        return CallFailed(
            worker_id=message.worker_id,
            result=Envelope(status="error", parent_ref=_parent(state, command)),
            error=ToolError(
                kind="depth_limit",
                message=f"playbooks call each other more than {DEPTH_MAX} deep",
            ),
            **place,
        )
    reference = None if message.payload is None else _reference(message.payload, event_id)
    return CommandParked(
        worker_id=message.worker_id,
        kind=message.kind,
        child=ExecutionId(event_id) if message.kind == "playbook" else None,
        path=message.path,
        signal=message.signal,
        until_ms=message.until_ms,
        details=as_recorded(message.details),
        result=Envelope(status="ok", reference=reference, parent_ref=_parent(state, command)),
        **place,
    )


def _child_ended(state: ExecutionState, message: ChildEnded) -> CallDone | CallFailed | None:
    command = state.commands.get(message.command_id)
    if command is None or command.parked is None or command.parked.child != message.child_id:
        return None
    assert command.worker_id is not None, message.command_id
    reference = None
    if message.result is not None and message.result.reference is not None:
        reference = message.result.reference
        if reference.execution_id is None:
            reference = msgspec.structs.replace(reference, execution_id=message.child_id)
    envelope = Envelope(
        status="ok" if message.status == "COMPLETED" else "error",
        reference=reference,
        parent_ref=_parent(state, command),
        context={"execution_id": str(message.child_id), "execution_status": message.status},
    )
    place = _place(state, message.command_id, command)
    if message.status == "COMPLETED":
        return CallDone(worker_id=command.worker_id, result=envelope, **place)
    return CallFailed(
        worker_id=command.worker_id, result=envelope, error=_child_error(message), **place
    )


def _child_error(message: ChildEnded) -> ToolError:
    why = "" if message.error is None else f": {message.error.message}"
    return ToolError(
        kind="playbook_failed",
        message=f"the child execution {message.child_id} is {message.status}{why}",
        details={"execution_id": str(message.child_id), "status": message.status},
    )


def _partial(state: ExecutionState, message: Partial, event_id: EventId) -> CallPartial | None:
    """Chunks count in their order; what another attempt has sent already is there."""
    command = state.commands.get(message.command_id)
    if command is None or command.chunks != message.chunk_index:
        return None
    return CallPartial(
        worker_id=message.worker_id,
        chunk_index=message.chunk_index,
        result=Envelope(
            status="ok",
            reference=_reference(message.stored, event_id),
            parent_ref=_parent(state, command),
            context=_context(message.context),
        ),
        **_place(state, message.command_id, command),
    )


def _due(state: ExecutionState, message: Due) -> AnyFact | None:
    if not state.is_open:
        return None
    if message.timer == EXECUTION_TIMER:
        error = ToolError(kind="timeout", message="the execution took longer than its timeout")
        return ExecutionFailed(error=error, generation=state.generation)
    timer = parse_timer(message.timer)
    if timer.visit_id is not None:
        visit = state.visits.get(timer.visit_id)
        if visit is None:
            return None
        error = ToolError(kind="timeout", message="the step took longer than its timeout")
        return abort(state, visit.step, visit.visit, error)
    assert timer.command_id is not None, message.timer
    command = state.commands.get(timer.command_id)
    if command is None or command.parked is None:
        return None
    return _wait_over(state, timer.command_id, command, command.parked)


def _wait_over(
    state: ExecutionState, command_id: CommandId, command: OpenCommand, parked: Parked
) -> CallDone | CallFailed:
    """A plain `wait` has what it wanted; whoever waited for somebody has waited in vain."""
    assert command.worker_id is not None, command_id
    place = _place(state, command_id, command)
    parent_ref = _parent(state, command)
    if parked.kind == "wait" and not parked.signal:
        envelope = Envelope(status="ok", parent_ref=parent_ref)
        return CallDone(worker_id=command.worker_id, result=envelope, **place)
    return CallFailed(
        worker_id=command.worker_id,
        result=Envelope(status="error", parent_ref=parent_ref),
        error=ToolError(kind="timeout", message=f"{_WAITED_FOR[parked.kind]} did not come in time"),
        **place,
    )


_WAITED_FOR = {
    "playbook": "the end of the child execution",
    "wait": "the signal",
    "approval": "the approval",
}


def _signal(
    state: ExecutionState, message: messages.Signal, event_id: EventId
) -> SignalReceived | None:
    if not state.is_open or message.signal_id in state.signals_seen:
        return None
    envelope = None
    if message.data is not None:
        envelope = Envelope(status="ok", reference=_reference(message.data, event_id))
    return SignalReceived(
        signal_id=message.signal_id,
        name=as_recorded(message.name),
        approved=message.approved,
        by=as_recorded(message.by),
        result=envelope,
    )


def _ended(
    state: ExecutionState, message: Done | Failed, event_id: EventId
) -> CallDone | CallFailed | None:
    command = state.commands.get(message.command_id)
    if command is None or command.parked is not None:
        return None
    if isinstance(message, Done) and message.chunks > command.chunks:
        return None  # its chunks are still on their way; the worker says it again
    common: dict[str, Any] = {
        "worker_id": message.worker_id,
        "result": Envelope(
            status="ok" if isinstance(message, Done) else "error",
            reference=None if message.stored is None else _reference(message.stored, event_id),
            parent_ref=_parent(state, command),
            context=_context(message.context),
        ),
        "ctx": compose({}, as_recorded(message.ctx)) if message.ctx else {},
        "duration_ms": message.duration_ms,
        **_place(state, message.command_id, command),
    }
    if isinstance(message, Failed):
        return CallFailed(error=_error(message), **common)
    return CallDone(frame_rows=message.frame_rows, sequence=command.sequence, **common)


def _place(state: ExecutionState, command_id: CommandId, command: OpenCommand) -> dict[str, Any]:
    """Which command a fact is about."""
    return {
        "step": command.step,
        "visit": command.visit,
        "command_id": command_id,
        "attempt": command.attempt,
        "iter_index": command.index,
        "loop_id": _loop_id(state, command),
    }


def _parent(state: ExecutionState, command: OpenCommand) -> ParentReference:
    parent_ref = state.visits[visit_id(command.step, command.visit)].parent_ref
    return ParentReference(ref_id=None if parent_ref is None else RefId(parent_ref))


def _context(given: dict[str, Any]) -> dict[str, Any]:
    """Small values for routing. What the log would refuse stays behind the reference."""
    if not given:
        return {}
    context: dict[str, Any] = as_recorded(given)
    return context if len(msgspec.json.encode(context)) <= 2 * CONTEXT_BYTES_MAX else {}


def _error(message: Failed) -> ToolError:
    return msgspec.convert(as_recorded(message.error), ToolError)


def _loop_id(state: ExecutionState, command: OpenCommand) -> LoopId | None:
    loop = state.visits[visit_id(command.step, command.visit)].loop
    return None if loop is None else loop.loop_id


def _reference(stored: Stored, event_id: EventId) -> Reference:
    return Reference(
        ref_id=RefId(event_id),
        type="db" if stored.tier == "db" else "object_store",
        uri=stored.uri or "",
        bytes=stored.size,
    )
