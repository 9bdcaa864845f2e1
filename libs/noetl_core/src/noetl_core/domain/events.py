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


class Again(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The attempt that follows an ended one: what it inherits, and when it may begin."""

    attempt: int
    page: int = 1
    failures: int = 0
    """How often this page has failed so far. A lost attempt is not a failure."""
    given_back: int = 0
    """How often a worker has given it back, because it stopped: neither a failure nor a loss."""
    delay_s: float = 0.0
    call: dict[str, Any] = {}
    """What is laid over the fields of the tool: the rendered `next_call` of a page."""
    sequence: EventId | None = None
    """The end of the first page: the manifest that the pages are listed in."""
    chunks: int = 0
    """How many chunks of a streamed result are recorded already."""
    failures_watched: int = 0
    """How many failures the circuit breaker of the step looks at; 0 when it has none."""
    open_until_ms: int = 0
    """Until when the circuit breaker lets nothing through."""


class ExecutionStarted(Fact, frozen=True, kw_only=True, tag="execution.started"):
    """A client's request was accepted. Its payload, if any, is the result of this event.

    A child names its parent's command. A fork names its origin, where it begins, and what it
    inherits.
    """

    catalog_id: CatalogId
    path: str = ""
    version: int = 0
    result: Envelope | None = None
    parent_execution_id: ExecutionId | None = None
    parent_command_id: CommandId | None = None
    return_step: StepName | None = None
    depth: int = 0
    iter_parent: dict[str, Any] = {}
    origin: ExecutionId | None = None
    entry: StepName | None = None
    input: dict[str, Any] = {}
    ctx: dict[str, Any] = {}
    steps: dict[StepName, Envelope] = {}


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a streamed result that a token carries: what its source step means to it."""

    step: StepName
    result: Envelope


class Given(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a token brought into a step. A retry enters the step with the same."""

    parent_ref: int | None = None
    input: dict[str, Any] = {}
    chunk: Chunk | None = None


class StepEntered(Fact, frozen=True, kw_only=True, tag="step.enter"):
    """A token came in. `tokens`: how many it stands for, where they waited at a barrier."""

    step: StepName
    visit: int
    tokens: int = 1
    parent_ref: int | None = None
    input: dict[str, Any] = {}
    chunk: Chunk | None = None


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
    page: int = 1
    failures: int = 0
    given_back: int = 0
    call: dict[str, Any] = {}
    sequence: EventId | None = None
    chunks: int = 0
    parent_event_id: EventId | None = None
    """The end of the attempt or page before this one."""
    target_worker: WorkerId | None = None
    """Only this worker may take it during the first `target_s` seconds."""
    target_s: float = 0.0


class ShardEnqueued(Fact, frozen=True, kw_only=True, tag="loop.shard.enqueued"):
    """One item of a fan-out was handed out; its command follows."""

    step: StepName
    visit: int
    loop_id: LoopId
    iter_index: int


class CommandClaimed(Fact, frozen=True, kw_only=True, tag="command.claimed"):
    """A worker has it."""

    step: StepName
    visit: int
    command_id: CommandId
    worker_id: WorkerId
    attempt: int = 1
    loop_id: LoopId | None = None
    iter_index: int | None = None


class CommandParked(Fact, frozen=True, kw_only=True, tag="command.parked"):
    """The command waits for something elsewhere, and holds no worker meanwhile.

    `child` is the execution that it waits for; `signal` the name that may end the wait; `until_ms`
    when it ends by itself (a `wait` well, anything else as a timeout).
    """

    step: StepName
    visit: int
    command_id: CommandId
    worker_id: WorkerId
    kind: Literal["playbook", "wait", "approval"]
    attempt: int = 1
    loop_id: LoopId | None = None
    iter_index: int | None = None
    child: ExecutionId | None = None
    path: str = ""
    signal: str = ""
    until_ms: int | None = None
    details: dict[str, Any] = {}
    result: Envelope | None = None


class CallPartial(Fact, frozen=True, kw_only=True, tag="call.partial"):
    """A chunk of a result that is still being read. `hops`: where its tokens went."""

    step: StepName
    visit: int
    command_id: CommandId
    worker_id: WorkerId
    chunk_index: int
    result: Envelope
    attempt: int = 1
    loop_id: LoopId | None = None
    iter_index: int | None = None
    hops: tuple["Hop", ...] = ()
    ctx: dict[str, Any] = {}


class CallDone(Fact, frozen=True, kw_only=True, tag="call.done"):
    """The tool ended well. `ctx`: what its tasks set. `again`: another page follows."""

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
    again: Again | None = None
    frame_rows: int | None = None
    """Of a cursor loop: how many rows were claimed. None were: this slot has ended."""
    sequence: EventId | None = None
    """The pages that this one belongs to, from the second on."""
    signal_id: int | None = None
    """The signal that ended a wait."""


class ShardDone(CallDone, frozen=True, kw_only=True, tag="loop.shard.done"):
    """An item of a fan-out has ended well."""


class CallFailed(Fact, frozen=True, kw_only=True, tag="call.error"):
    """The tool failed, after whatever its own rules tried. `again`: another attempt follows."""

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
    again: Again | None = None
    signal_id: int | None = None


class ShardFailed(CallFailed, frozen=True, kw_only=True, tag="loop.shard.failed"):
    """An item of a fan-out has failed, and no further attempt will be made."""


class CommandExpired(Fact, frozen=True, kw_only=True, tag="command.expired"):
    """The lease ran out, or the command was lost. Without `again` no further attempt is made."""

    step: StepName
    visit: int
    command_id: CommandId
    error: ToolError
    attempt: int = 1
    loop_id: LoopId | None = None
    iter_index: int | None = None
    again: Again | None = None


class RetryCompleted(Fact, frozen=True, kw_only=True, tag="retry.completed"):
    """A sequence of pages has ended; its result is what they collected."""

    step: StepName
    visit: int
    result: Envelope
    sequence: EventId
    pages: int
    collect: str = "append"
    merge_path: str = ""
    loop_id: LoopId | None = None
    iter_index: int | None = None


class StepAborted(Fact, frozen=True, kw_only=True, tag="step.aborted"):
    """The step's time is over. Its open commands count no more."""

    step: StepName
    visit: int
    error: ToolError
    commands: tuple[CommandId, ...] = ()


class SignalReceived(Fact, frozen=True, kw_only=True, tag="signal.received"):
    """Somebody told the execution something. Its data is the result of this event."""

    signal_id: int
    name: str
    approved: bool = True
    by: str = ""
    result: Envelope | None = None


class LoopStarted(Fact, frozen=True, kw_only=True, tag="loop.started"):
    """`parts` is how many pieces of the collection are stored. `loop_id` is this event's own id."""

    step: StepName
    visit: int
    loop_id: LoopId | None = None
    total: int
    part_size: int
    parts: int
    max_in_flight: int
    fail_fast: bool = True
    is_cursor: bool = False
    """It has no collection: its commands claim rows until there are none."""
    base: LoopId | None = None
    """The activation that this one goes on with: only what it left undone is run, and the parts
    list the indexes of that."""
    base_done: int = 0
    collection_id: LoopId | None = None
    """The activation that stored the items, where this one only lists indexes."""
    collection_ref: str = ""


class FanoutStarted(LoopStarted, frozen=True, kw_only=True, tag="loop.fanout.started"):
    """Every item is a shard that any worker may take, in any order."""

    shard_retries_max: int = 0
    allow_partial: bool = True


FaninStatus = Literal["complete", "partial", "failed"]


class LoopDone(Fact, frozen=True, kw_only=True, tag="loop.done"):
    """Every item has ended, or the first failure has and what was open with it."""

    step: StepName
    visit: int
    loop_id: LoopId
    total: int
    done: int
    failed: int
    status: Literal["ok", "error"]
    fanin: FaninStatus = "complete"


class FaninCompleted(LoopDone, frozen=True, kw_only=True, tag="loop.fanin.completed"):
    """Every shard of a fan-out has ended."""


class Hop(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An arc that was taken: where the token went. `barrier`: it waits there for the others."""

    step: StepName
    barrier: bool = False
    input: dict[str, Any] = {}


class StepExited(Fact, frozen=True, kw_only=True, tag="step.exit"):
    """The step ended well. `hops`: where its token went."""

    step: StepName
    visit: int
    result: Envelope
    hops: tuple[Hop, ...] = ()
    ctx: dict[str, Any] = {}


class StepSkipped(StepExited, frozen=True, kw_only=True, tag="step.skipped"):
    """The step's admission rules did not let it run. Its token went on."""


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

    generation: int = 0
    result: Envelope | None = None


class ExecutionFailed(Fact, frozen=True, kw_only=True, tag="execution.failed"):
    """A failure that no arc took. Whatever else was open is stopped."""

    generation: int = 0
    error: ToolError
    step: StepName | None = None


class ExecutionCancelled(Fact, frozen=True, kw_only=True, tag="execution.cancelled"):
    """Somebody asked for it. Whatever was open is stopped."""

    generation: int = 0
    reason: str = ""


class ExecutionPaused(Fact, frozen=True, kw_only=True, tag="execution.paused"):
    """No command is begun until it is resumed; what runs comes to its end."""

    number: int
    reason: str = ""


class ExecutionResumed(Fact, frozen=True, kw_only=True, tag="execution.resumed"):
    number: int


class ExecutionRetried(Fact, frozen=True, kw_only=True, tag="execution.retried"):
    """An execution that had ended goes on. `entries`: the steps that are entered again.

    `items` is `failed` when loops run only the items that have not ended well.
    """

    generation: int
    entries: tuple[StepName, ...]
    given: tuple[Given, ...] = ()
    """What each of them had been given before; left out where none was given anything."""
    items: Literal["failed", "all"] = "failed"


AnyFact = (
    ExecutionStarted
    | StepEntered
    | CommandIssued
    | CommandClaimed
    | CommandParked
    | CallPartial
    | CallDone
    | CallFailed
    | CommandExpired
    | RetryCompleted
    | LoopStarted
    | FanoutStarted
    | ShardEnqueued
    | ShardDone
    | ShardFailed
    | LoopDone
    | FaninCompleted
    | StepExited
    | StepSkipped
    | StepFailed
    | StepAborted
    | SignalReceived
    | CheckpointCommitted
    | ExecutionPaused
    | ExecutionResumed
    | ExecutionRetried
    | ExecutionCompleted
    | ExecutionFailed
    | ExecutionCancelled
)


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A fact and its place in the log. Within an execution, ids ascend in commit order."""

    execution_id: ExecutionId
    event_id: EventId
    fact: AnyFact


def event_key(fact: AnyFact) -> str:  # noqa: C901, PLR0911, PLR0912 - one case an event
    """The natural key: deterministic, unique within the execution."""
    match fact:
        case CallDone() | CallFailed() | CommandExpired():
            return f"end:{fact.command_id}"
        case CommandIssued() | CommandClaimed() | CommandParked():
            return f"{type_name(fact)}:{fact.command_id}"
        case CallPartial():
            return f"partial:{call_of(fact.command_id)}:{fact.chunk_index}"
        case StepExited() | StepFailed():
            return f"leave:{visit_id(fact.step, fact.visit)}"
        case ShardEnqueued():
            return f"shard:{visit_id(fact.step, fact.visit)}/{fact.iter_index}"
        case RetryCompleted():
            item = "" if fact.iter_index is None else f"/{fact.iter_index}"
            return f"retry:{visit_id(fact.step, fact.visit)}{item}"
        case LoopStarted():
            return f"loop.started:{visit_id(fact.step, fact.visit)}"
        case LoopDone():
            return f"loop.done:{visit_id(fact.step, fact.visit)}"
        case StepEntered() | StepAborted():
            return f"{type_name(fact)}:{visit_id(fact.step, fact.visit)}"
        case SignalReceived():
            return f"signal:{fact.signal_id}"
        case CheckpointCommitted():
            return f"checkpoint:{fact.barrier}"
        case ExecutionStarted():
            return "start"
        case ExecutionPaused() | ExecutionResumed():
            return f"{type_name(fact)}:{fact.number}"
        case ExecutionRetried():
            return f"retried:{fact.generation}"
        case ExecutionCompleted() | ExecutionFailed() | ExecutionCancelled():
            return "end" if fact.generation == 0 else f"end:{fact.generation}"


def call_of(command_id: str) -> str:
    """The command without its attempt: what all attempts at it share."""
    return command_id.rpartition("#")[0]


_TYPE_NAMES: dict[type, str] = {kind: str(kind.__struct_config__.tag) for kind in AnyFact.__args__}

FACT_BY_TYPE: dict[str, type[Any]] = {name: kind for kind, name in _TYPE_NAMES.items()}


def type_name(fact: AnyFact) -> str:
    """`loop.done`: how the fact is called in the log and on the wire."""
    return _TYPE_NAMES[type(fact)]
