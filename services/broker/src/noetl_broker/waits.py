"""Which fact follows from what waits and from control: children, timers, signals, retries."""

import msgspec

from noetl_broker.attempt import parent_of, place_of, reference_of
from noetl_core.domain.ctx import as_recorded
from noetl_core.domain.envelope import Envelope
from noetl_core.domain.errors import ToolError
from noetl_core.domain.events import (
    AnyFact,
    CallDone,
    CallFailed,
    CommandParked,
    ExecutionFailed,
    ExecutionRetried,
    Given,
    SignalReceived,
)
from noetl_core.domain.ids import CommandId, EventId, ExecutionId
from noetl_core.domain.retry import abort
from noetl_core.domain.state import ExecutionState, OpenCommand, Parked
from noetl_core.domain.timers import execution_timer, parse_timer
from noetl_core.wire import messages
from noetl_core.wire.messages import ChildEnded, Due, Retry

DEPTH_MAX = 32
"""How deep playbooks may call each other: more is a recursion that never ends."""


def parked(
    state: ExecutionState, message: messages.Parked, event_id: EventId
) -> CommandParked | CallFailed | None:
    """The child's id is the id of this event: known before it is started, and nobody else's."""
    command = state.commands.get(message.command_id)
    if command is None or command.parked is not None:
        return None
    place = place_of(state, message.command_id, command)
    if message.kind == "playbook" and state.depth + 1 > DEPTH_MAX:
        return CallFailed(
            worker_id=message.worker_id,
            result=Envelope(status="error", parent_ref=parent_of(state, command)),
            error=ToolError(
                kind="depth_limit",
                message=f"playbooks call each other more than {DEPTH_MAX} deep",
            ),
            **place,
        )
    reference = None if message.payload is None else reference_of(message.payload, event_id)
    return CommandParked(
        worker_id=message.worker_id,
        kind=message.kind,
        child=ExecutionId(event_id) if message.kind == "playbook" else None,
        path=message.path,
        signal=message.signal,
        until_ms=message.until_ms,
        details=as_recorded(message.details),
        result=Envelope(status="ok", reference=reference, parent_ref=parent_of(state, command)),
        **place,
    )


def child_ended(state: ExecutionState, message: ChildEnded) -> CallDone | CallFailed | None:
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
        parent_ref=parent_of(state, command),
        context={"execution_id": str(message.child_id), "execution_status": message.status},
    )
    place = place_of(state, message.command_id, command)
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


def due(state: ExecutionState, message: Due) -> AnyFact | None:
    if not state.is_open:
        return None
    if message.timer == execution_timer(state.generation):
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
    place = place_of(state, command_id, command)
    parent_ref = parent_of(state, command)
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


def signal(
    state: ExecutionState, message: messages.Signal, event_id: EventId
) -> SignalReceived | None:
    if not state.is_open or message.signal_id in state.signals_seen:
        return None
    envelope = None
    if message.data is not None:
        envelope = Envelope(status="ok", reference=reference_of(message.data, event_id))
    return SignalReceived(
        signal_id=message.signal_id,
        name=as_recorded(message.name),
        approved=message.approved,
        by=as_recorded(message.by),
        result=envelope,
    )


def retried(state: ExecutionState, message: Retry) -> ExecutionRetried | None:
    """From a step that was asked for, else from everything that was under way at the end."""
    if not state.is_terminal:
        return None
    if message.step is not None:
        if message.step not in state.steps:
            return None
        visits = [(message.step, state.steps[message.step].given)]
    elif state.status == "COMPLETED":
        return None
    else:
        found = sorted(state.interrupted.items())
        visits = [(name, given) for name, all_given in found for given in all_given]
    if not visits and not state.held_back:
        return None
    given = tuple(given for _, given in visits)
    return ExecutionRetried(
        generation=state.generation + 1,
        entries=tuple(name for name, _ in visits),
        given=given if any(one != Given() for one in given) else (),
        items=message.items,
    )
