"""Every fact the log can hold. The tag is the wire name; the natural key makes it recordable once.

A fact says what happened to one execution. `Event` is a fact with its place in the log. Keys that
two facts share are one question with one answer: an attempt ends once (done, failed or expired), a
visit is left once, an execution ends once.
"""

from typing import Any, Literal

import msgspec

from noetl_core.domain.envelope import Envelope
from noetl_core.domain.errors import ToolError
from noetl_core.domain.ids import (
    CatalogId,
    CommandId,
    EpochId,
    EventId,
    ExecutionId,
    LoopId,
    StepName,
    WorkerId,
    visit_id,
)


class Fact(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened. Fields that are columns of `noetl.event` keep their names there."""


class ExecutionStarted(Fact, frozen=True, kw_only=True, tag="execution.started"):
    """A client's request was accepted. Its payload, if any, is the result of this event."""

    catalog_id: CatalogId
    path: str = ""
    version: int = 0
    result: Envelope | None = None


class StepEntered(Fact, frozen=True, kw_only=True, tag="step.enter"):
    """A token came in. `tokens`: how many it stands for, where they waited at a barrier."""

    step: StepName
    visit: int
    tokens: int = 1
    parent_ref: int | None = None


class CommandIssued(Fact, frozen=True, kw_only=True, tag="command.issued"):
    """A worker may take it from now on."""

    step: StepName
    visit: int
    command_id: CommandId
    attempt: int = 1
    loop_id: LoopId | None = None
    iter_index: int | None = None
    pool: str = "cpu"
    priority: int = 0
    delay_s: float = 0.0


class CommandClaimed(Fact, frozen=True, kw_only=True, tag="command.claimed"):
    """A worker has it."""

    step: StepName
    visit: int
    command_id: CommandId
    worker_id: WorkerId
    attempt: int = 1
    loop_id: LoopId | None = None
    iter_index: int | None = None


class CallDone(Fact, frozen=True, kw_only=True, tag="call.done"):
    """The tool ended well. `ctx`: what its tasks set."""

    step: StepName
    visit: int
    command_id: CommandId
    worker_id: WorkerId
    result: Envelope
    attempt: int = 1
    loop_id: LoopId | None = None
    iter_index: int | None = None
    ctx: dict[str, Any] = {}
    duration_ms: float = 0.0


class CallFailed(Fact, frozen=True, kw_only=True, tag="call.error"):
    """The tool failed, after whatever its own rules tried."""

    step: StepName
    visit: int
    command_id: CommandId
    worker_id: WorkerId
    result: Envelope
    error: ToolError
    attempt: int = 1
    loop_id: LoopId | None = None
    iter_index: int | None = None
    ctx: dict[str, Any] = {}
    duration_ms: float = 0.0


class CommandExpired(Fact, frozen=True, kw_only=True, tag="command.expired"):
    """The lease ran out, or the command was lost. `final`: no further attempt will be made."""

    step: StepName
    visit: int
    command_id: CommandId
    error: ToolError
    attempt: int = 1
    loop_id: LoopId | None = None
    iter_index: int | None = None
    final: bool = False


class LoopStarted(Fact, frozen=True, kw_only=True, tag="loop.started"):
    """`parts` is how many pieces of the collection are stored behind this event's id."""

    step: StepName
    visit: int
    total: int
    part_size: int
    parts: int
    max_in_flight: int
    fail_fast: bool = True


class LoopDone(Fact, frozen=True, kw_only=True, tag="loop.done"):
    """Every item has ended, or the first failure has and what was open with it."""

    step: StepName
    visit: int
    loop_id: LoopId
    total: int
    done: int
    failed: int
    status: Literal["ok", "error"]


class Hop(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An arc that was taken: where the token went. `barrier`: it waits there for the others."""

    step: StepName
    barrier: bool = False


class StepExited(Fact, frozen=True, kw_only=True, tag="step.exit"):
    """The step ended well. `hops`: where its token went."""

    step: StepName
    visit: int
    result: Envelope
    hops: tuple[Hop, ...] = ()
    ctx: dict[str, Any] = {}


class StepFailed(Fact, frozen=True, kw_only=True, tag="step.failed"):
    """`handled`: a failure arc was taken, so the execution goes on."""

    step: StepName
    visit: int
    result: Envelope
    error: ToolError
    hops: tuple[Hop, ...] = ()
    ctx: dict[str, Any] = {}
    handled: bool = False


class CheckpointCommitted(Fact, frozen=True, kw_only=True, tag="checkpoint.committed"):
    """The epoch was closed with this execution at this point."""

    barrier: EpochId


class ExecutionCompleted(Fact, frozen=True, kw_only=True, tag="execution.completed"):
    """No token and no command is left."""

    result: Envelope | None = None


class ExecutionFailed(Fact, frozen=True, kw_only=True, tag="execution.failed"):
    """A failure that no arc took. Whatever else was open is stopped."""

    error: ToolError
    step: StepName | None = None


class ExecutionCancelled(Fact, frozen=True, kw_only=True, tag="execution.cancelled"):
    """Somebody asked for it. Whatever was open is stopped."""

    reason: str = ""


AnyFact = (
    ExecutionStarted
    | StepEntered
    | CommandIssued
    | CommandClaimed
    | CallDone
    | CallFailed
    | CommandExpired
    | LoopStarted
    | LoopDone
    | StepExited
    | StepFailed
    | CheckpointCommitted
    | ExecutionCompleted
    | ExecutionFailed
    | ExecutionCancelled
)


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A fact and its place in the log. Within an execution, ids ascend in commit order."""

    execution_id: ExecutionId
    event_id: EventId
    fact: AnyFact


def event_key(fact: AnyFact) -> str:
    """The natural key: deterministic, unique within the execution."""
    match fact:
        case CallDone() | CallFailed() | CommandExpired():
            return f"end:{fact.command_id}"
        case CommandIssued() | CommandClaimed():
            return f"{type_name(fact)}:{fact.command_id}"
        case StepExited() | StepFailed():
            return f"leave:{visit_id(fact.step, fact.visit)}"
        case StepEntered() | LoopStarted() | LoopDone():
            return f"{type_name(fact)}:{visit_id(fact.step, fact.visit)}"
        case CheckpointCommitted():
            return f"checkpoint:{fact.barrier}"
        case ExecutionStarted():
            return "start"
        case ExecutionCompleted() | ExecutionFailed() | ExecutionCancelled():
            return "end"


_TYPE_NAMES: dict[type, str] = {kind: str(kind.__struct_config__.tag) for kind in AnyFact.__args__}

FACT_BY_TYPE: dict[str, type[Any]] = {name: kind for kind, name in _TYPE_NAMES.items()}


def type_name(fact: AnyFact) -> str:
    """`loop.done`: how the fact is called in the log and on the wire."""
    return _TYPE_NAMES[type(fact)]
