"""Which attempt a fact is about, and where its result is."""

from typing import Any

from noetl_core.domain.envelope import ParentReference, Reference
from noetl_core.domain.ids import CommandId, EventId, LoopId, RefId, visit_id
from noetl_core.domain.state import ExecutionState, OpenCommand
from noetl_core.wire.messages import Stored


def place_of(state: ExecutionState, command_id: CommandId, command: OpenCommand) -> dict[str, Any]:
    """Which command a fact is about."""
    return {
        "step": command.step,
        "visit": command.visit,
        "command_id": command_id,
        "attempt": command.attempt,
        "iter_index": command.index,
        "loop_id": loop_id_of(state, command),
    }


def parent_of(state: ExecutionState, command: OpenCommand) -> ParentReference:
    parent_ref = state.visits[visit_id(command.step, command.visit)].parent_ref
    return ParentReference(ref_id=None if parent_ref is None else RefId(parent_ref))


def loop_id_of(state: ExecutionState, command: OpenCommand) -> LoopId | None:
    loop = state.visits[visit_id(command.step, command.visit)].loop
    return None if loop is None else loop.loop_id


def reference_of(stored: Stored, event_id: EventId) -> Reference:
    return Reference(
        ref_id=RefId(event_id),
        type="db" if stored.tier == "db" else "object_store",
        uri=stored.uri or "",
        bytes=stored.size,
    )
