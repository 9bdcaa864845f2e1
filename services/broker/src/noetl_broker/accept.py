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
    CheckpointCommitted,
    CommandClaimed,
    CommandExpired,
    ExecutionCancelled,
    ExecutionStarted,
)
from noetl_core.domain.ids import CommandId, EpochId, EventId, LoopId, RefId, visit_id
from noetl_core.domain.state import ExecutionState, OpenCommand
from noetl_core.wire.messages import (
    Cancel,
    Claimed,
    Done,
    Expired,
    Failed,
    Start,
    Stored,
)

COMMAND_ATTEMPTS_MAX = 5
"""How often a command may be lost (a worker died under it) before it counts as failed."""

ExecutionMessage = Start | Cancel | Claimed | Done | Failed | Expired


def accept(state: ExecutionState, message: ExecutionMessage, event_id: EventId) -> AnyFact | None:
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
        case Cancel():
            if state.status == "RUNNING":
                return ExecutionCancelled(reason=as_recorded(message.reason))
            return None
        case _:
            assert_never(message)


def checkpoint(state: ExecutionState, epoch: EpochId) -> CheckpointCommitted | None:
    if state.status != "RUNNING" or epoch <= state.epoch:
        return None
    return CheckpointCommitted(barrier=epoch)


def expire(state: ExecutionState, command_id: CommandId, reason: str) -> CommandExpired | None:
    command = state.commands.get(command_id)
    if command is None:
        return None
    final = command.attempt >= COMMAND_ATTEMPTS_MAX
    return CommandExpired(
        step=command.step,
        visit=command.visit,
        command_id=command_id,
        attempt=command.attempt,
        iter_index=command.index,
        loop_id=_loop_id(state, command),
        final=final,
        error=ToolError(kind="lost", message=as_recorded(reason), retryable=not final),
    )


def _started(state: ExecutionState, message: Start, event_id: EventId) -> ExecutionStarted | None:
    if state.status != "PENDING":
        return None
    envelope = None
    if message.payload is not None:
        envelope = Envelope(status="ok", reference=_reference(message.payload, event_id))
    return ExecutionStarted(
        catalog_id=message.catalog_id, path=message.path, version=message.version, result=envelope
    )


def _claimed(state: ExecutionState, message: Claimed) -> CommandClaimed | None:
    command = state.commands.get(message.command_id)
    if command is None or command.worker_id is not None:
        return None
    return CommandClaimed(
        step=command.step,
        visit=command.visit,
        command_id=message.command_id,
        worker_id=message.worker_id,
        attempt=command.attempt,
        iter_index=command.index,
        loop_id=_loop_id(state, command),
    )


def _ended(
    state: ExecutionState, message: Done | Failed, event_id: EventId
) -> CallDone | CallFailed | None:
    command = state.commands.get(message.command_id)
    if command is None:
        return None
    parent_ref = state.visits[visit_id(command.step, command.visit)].parent_ref
    envelope = Envelope(
        status="ok" if isinstance(message, Done) else "error",
        reference=None if message.stored is None else _reference(message.stored, event_id),
        parent_ref=ParentReference(ref_id=None if parent_ref is None else RefId(parent_ref)),
        context=_context(message),
    )
    kind: type[CallDone | CallFailed] = CallDone
    extra = {}
    if isinstance(message, Failed):
        kind, extra = CallFailed, {"error": _error(message)}
    return kind(
        step=command.step,
        visit=command.visit,
        command_id=message.command_id,
        worker_id=message.worker_id,
        result=envelope,
        attempt=command.attempt,
        iter_index=command.index,
        loop_id=_loop_id(state, command),
        ctx=compose({}, as_recorded(message.ctx)) if message.ctx else {},
        duration_ms=message.duration_ms,
        **extra,
    )


def _context(message: Done | Failed) -> dict[str, Any]:
    """Small values for routing. What the log would refuse stays behind the reference."""
    if not message.context:
        return {}
    context: dict[str, Any] = as_recorded(message.context)
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
