"""Which fact, if any, follows from a message. Pure.

The state of an execution is exact, because its shard has one writer. So it alone tells a new
message from one that came again: a command that is not open has ended, an execution that has a
playbook was started. Everything that is not new gives None and is dropped.
"""

from typing import Any, assert_never

import msgspec

from noetl_broker import waits
from noetl_broker.attempt import loop_id_of, parent_of, place_of, reference_of
from noetl_core.domain.ctx import as_recorded, compose
from noetl_core.domain.envelope import CONTEXT_BYTES_MAX, Envelope
from noetl_core.domain.errors import ToolError
from noetl_core.domain.events import (
    Again,
    AnyFact,
    CallDone,
    CallFailed,
    CallPartial,
    CheckpointCommitted,
    CommandClaimed,
    CommandExpired,
    ExecutionCancelled,
    ExecutionPaused,
    ExecutionResumed,
    ExecutionStarted,
)
from noetl_core.domain.ids import (
    CommandId,
    EpochId,
    EventId,
)
from noetl_core.domain.retry import after_given_back, after_loss
from noetl_core.domain.state import ExecutionState
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
)

COMMAND_ATTEMPTS_MAX = 5
"""How often a command may be lost (a worker died under it) before it counts as failed."""

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
    state: ExecutionState,
    message: ExecutionMessage,
    event_id: EventId,
    *,
    attempts_max: int = COMMAND_ATTEMPTS_MAX,
) -> AnyFact | None:
    """`event_id` is the id the fact will have: a result is referred to by it."""
    match message:
        case Claimed():
            return _claimed(state, message)
        case Done() | Failed():
            return _ended(state, message, event_id)
        case Expired():
            return expire(
                state,
                message.command_id,
                message.reason,
                attempts_max=attempts_max,
                given_back=message.given_back,
            )
        case Start():
            return _started(state, message, event_id)
        case messages.Parked():
            return waits.parked(state, message, event_id)
        case ChildEnded():
            return waits.child_ended(state, message)
        case Partial():
            return _partial(state, message, event_id)
        case Due():
            return waits.due(state, message)
        case messages.Signal():
            return waits.signal(state, message, event_id)
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
            return waits.retried(state, message)
        case _:
            assert_never(message)


def checkpoint(state: ExecutionState, epoch: EpochId) -> CheckpointCommitted | None:
    if not state.is_open or epoch <= state.epoch:
        return None
    return CheckpointCommitted(barrier=epoch)


def expire(
    state: ExecutionState,
    command_id: CommandId,
    reason: str,
    *,
    attempts_max: int = COMMAND_ATTEMPTS_MAX,
    given_back: bool = False,
) -> CommandExpired | None:
    command = state.commands.get(command_id)
    if command is None or command.parked is not None:
        return None
    again: Again | None = None
    if given_back:
        again = after_given_back(command)
    elif command.losses < attempts_max:
        again = after_loss(command)
    return CommandExpired(
        step=command.step,
        visit=command.visit,
        command_id=command_id,
        attempt=command.attempt,
        iter_index=command.index,
        loop_id=loop_id_of(state, command),
        again=again,
        error=ToolError(kind="lost", message=as_recorded(reason), retryable=again is not None),
    )


def _started(state: ExecutionState, message: Start, event_id: EventId) -> ExecutionStarted | None:
    if state.status != "PENDING":
        return None
    envelope = None
    if message.payload is not None:
        envelope = Envelope(status="ok", reference=reference_of(message.payload, event_id))
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


def claim_before(state: ExecutionState, message: ExecutionMessage) -> CommandClaimed | None:
    """Who says what came of a command has claimed it, even where that word was late or lost."""
    if not isinstance(message, Done | Failed | messages.Parked | Partial):
        return None
    return _claimed(
        state,
        Claimed(
            execution_id=message.execution_id,
            command_id=message.command_id,
            worker_id=message.worker_id,
        ),
    )


def _claimed(state: ExecutionState, message: Claimed) -> CommandClaimed | None:
    command = state.commands.get(message.command_id)
    if command is None or command.worker_id is not None:
        return None
    return CommandClaimed(
        worker_id=message.worker_id, **place_of(state, message.command_id, command)
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
            reference=reference_of(message.stored, event_id),
            parent_ref=parent_of(state, command),
            context=_context(message.context),
        ),
        **place_of(state, message.command_id, command),
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
            reference=None if message.stored is None else reference_of(message.stored, event_id),
            parent_ref=parent_of(state, command),
            context=_context(message.context),
        ),
        "ctx": compose({}, as_recorded(message.ctx)) if message.ctx else {},
        "duration_ms": message.duration_ms,
        **place_of(state, message.command_id, command),
    }
    if isinstance(message, Failed):
        return CallFailed(error=_error(message), **common)
    return CallDone(frame_rows=message.frame_rows, sequence=command.sequence, **common)


def _context(given: dict[str, Any]) -> dict[str, Any]:
    """Small values for routing. What the log would refuse stays behind the reference."""
    if not given:
        return {}
    context: dict[str, Any] = as_recorded(given)
    return context if len(msgspec.json.encode(context)) <= 2 * CONTEXT_BYTES_MAX else {}


def _error(message: Failed) -> ToolError:
    return msgspec.convert(as_recorded(message.error), ToolError)
