"""What executions tell each other: a parent starts, pauses and cancels, a child says how it ended.

A message goes into the inbox of its execution in the commit that records why it is sent. So it is
there exactly when the reason is, whoever dies in between, and a shard never writes the log of
another.
"""

from noetl_broker.turn import Turn
from noetl_core.domain.envelope import Envelope
from noetl_core.domain.events import (
    CommandParked,
    Event,
    ExecutionCancelled,
    ExecutionCompleted,
    ExecutionFailed,
)
from noetl_core.domain.ids import ExecutionId
from noetl_core.domain.state import ExecutionState
from noetl_core.store.batch import OutgoingRow
from noetl_core.wire.messages import (
    Cancel,
    ChildEnded,
    Message,
    Parent,
    Parked,
    Pause,
    Resume,
    Start,
    encode_messages,
)


def start_child(turn: Turn, state: ExecutionState, message: Parked, fact: CommandParked) -> None:
    assert fact.child is not None, fact
    assert message.catalog_id is not None, message
    start = Start(
        execution_id=fact.child,
        catalog_id=message.catalog_id,
        path=message.path,
        version=message.version,
        payload=message.payload,
        parent=Parent(
            execution_id=state.execution_id,
            command_id=fact.command_id,
            return_step=message.return_step,
            depth=state.depth + 1,
            iterator=message.iterator,
        ),
    )
    _send(turn, fact.child, start, sender=state)


def on_end(turn: Turn, state: ExecutionState, event: Event) -> None:
    """Something ended: children that nobody waits for any more are cancelled, a parent is told."""
    for child in state.orphans:
        reason = f"the execution {state.execution_id} that waited for it went on without it"
        _send(turn, child, Cancel(execution_id=child, reason=reason), sender=state)
    if isinstance(event.fact, ExecutionCompleted | ExecutionFailed | ExecutionCancelled):
        _tell_parent(turn, state, event.fact)


def on_pause(turn: Turn, state: ExecutionState) -> None:
    """Paused or resumed: the commands that wait for a worker, and the children, with it."""
    is_paused = state.status == "PAUSED"
    turn.batch.is_held[state.execution_id] = is_paused
    for command in state.commands.values():
        child = None if command.parked is None else command.parked.child
        if child is not None:
            reason = f"the execution {state.execution_id} is paused"
            pause = Pause(execution_id=child, reason=reason)
            _send(turn, child, pause if is_paused else Resume(execution_id=child), sender=state)


def _tell_parent(
    turn: Turn,
    state: ExecutionState,
    fact: ExecutionCompleted | ExecutionFailed | ExecutionCancelled,
) -> None:
    if state.parent_execution_id is None or state.parent_command_id is None:
        return
    ended = ChildEnded(
        execution_id=state.parent_execution_id,
        command_id=state.parent_command_id,
        child_id=state.execution_id,
        status=_STATUS[type(fact)],  # type: ignore[arg-type]
        result=_returned(state, fact) if isinstance(fact, ExecutionCompleted) else None,
        error=state.error,
    )
    _send(turn, state.parent_execution_id, ended, sender=state)


_STATUS = {
    ExecutionCompleted: "COMPLETED",
    ExecutionFailed: "FAILED",
    ExecutionCancelled: "CANCELLED",
}


def _returned(state: ExecutionState, fact: ExecutionCompleted) -> Envelope | None:
    if state.return_step is None:
        return fact.result
    step = state.steps.get(state.return_step)
    return None if step is None else step.result


def _send(
    turn: Turn, execution_id: ExecutionId, message: Message, *, sender: ExecutionState
) -> None:
    body = encode_messages([message])
    turn.batch.outgoing.append(OutgoingRow(execution_id, body, sender.execution_id))
