"""What processes tell the broker. A body is a list of messages in msgpack: one message = one batch.

None of these is a fact yet. The broker checks each against the state and the lease, and records the
fact that follows from it; a message that comes twice changes nothing.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from noetl_core.domain import ids
from noetl_core.domain.envelope import Envelope
from noetl_core.domain.errors import ToolError
from noetl_core.domain.ids import ID_MAX, StepName

BODY_BYTES_MAX = 512 * 1024
NAME_PATTERN = r"^[^\x00-\x1f\x7f]+$"

# Anybody may publish. What no row can hold is no message: it is set aside as it came, instead of
# making the commit fail that takes it up.
ExecutionId = Annotated[ids.ExecutionId, Meta(ge=0, le=ID_MAX)]
CatalogId = Annotated[ids.CatalogId, Meta(ge=0, le=ID_MAX)]
EpochId = Annotated[ids.EpochId, Meta(ge=0, le=ID_MAX)]
ShardId = Annotated[ids.ShardId, Meta(ge=0, lt=1 << 31)]
CommandId = Annotated[ids.CommandId, Meta(pattern=NAME_PATTERN, max_length=4000)]
WorkerId = Annotated[ids.WorkerId, Meta(pattern=NAME_PATTERN, max_length=1000)]


class Stored(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A result that is ready to be recorded: inline bytes, or the place a tier has put it."""

    tier: str
    size: int
    sha256: bytes
    inline: bytes | None = None
    uri: str | None = None
    media_type: str = "application/json"
    ttl_s: float | None = None
    """After how long it may go."""


class Parent(msgspec.Struct, frozen=True, kw_only=True):
    """The command that a child execution was started by, and what that wants back."""

    execution_id: ExecutionId
    command_id: CommandId
    return_step: StepName | None = None
    depth: int = 1
    iterator: dict[str, Any] = {}


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """Where a fork begins, and what it has of the execution it comes from."""

    origin: ExecutionId
    entry: StepName
    ctx: dict[str, Any] = {}
    steps: dict[StepName, Envelope] = {}
    input: dict[str, Any] = {}
    """What the arc into the step brought along."""


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start", omit_defaults=True):
    """A client wants an execution. `payload` is JSON, merged over the playbook's workload."""

    execution_id: ExecutionId
    catalog_id: CatalogId
    path: str
    version: int
    payload: Stored | None = None
    parent: Parent | None = None
    fork: Fork | None = None


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    execution_id: ExecutionId
    reason: str = ""


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag="pause"):
    execution_id: ExecutionId
    reason: str = ""


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag="resume"):
    execution_id: ExecutionId


class Retry(msgspec.Struct, frozen=True, kw_only=True, tag="retry"):
    """Somebody wants an execution that has ended to go on, from what failed or from a step."""

    execution_id: ExecutionId
    step: StepName | None = None
    items: Literal["failed", "all"] = "failed"


class Signal(msgspec.Struct, frozen=True, kw_only=True, tag="signal"):
    """Somebody tells the execution something; `name` is what a step may wait for."""

    execution_id: ExecutionId
    signal_id: Annotated[int, Meta(ge=0, le=ID_MAX)]
    name: str
    approved: bool = True
    by: str = ""
    data: Stored | None = None


class Due(msgspec.Struct, frozen=True, kw_only=True, tag="due"):
    """The reaper saw a timer run out (noetl.timer)."""

    execution_id: ExecutionId
    timer: str


class Parked(msgspec.Struct, frozen=True, kw_only=True, tag="parked", omit_defaults=True):
    """A worker has found out what its command waits for, and is free again.

    `playbook`: the child to start, with its payload. `wait`, `approval`: the signal that ends it.
    """

    execution_id: ExecutionId
    command_id: CommandId
    worker_id: WorkerId
    kind: Literal["playbook", "wait", "approval"]
    catalog_id: CatalogId | None = None
    path: str = ""
    version: int = 0
    payload: Stored | None = None
    return_step: StepName | None = None
    iterator: dict[str, Any] = {}
    signal: str = ""
    until_ms: int | None = None
    details: dict[str, Any] = {}


class ChildEnded(msgspec.Struct, frozen=True, kw_only=True, tag="child_ended", omit_defaults=True):
    """To the parent (`execution_id`): the child that `command_id` waits for has ended."""

    execution_id: ExecutionId
    command_id: CommandId
    child_id: ExecutionId
    status: Literal["COMPLETED", "FAILED", "CANCELLED"]
    result: Envelope | None = None
    error: ToolError | None = None


class Partial(msgspec.Struct, frozen=True, kw_only=True, tag="partial", omit_defaults=True):
    """A chunk of a streamed result. It goes by the inbox: nobody holds it to say it again."""

    execution_id: ExecutionId
    command_id: CommandId
    worker_id: WorkerId
    chunk_index: int
    stored: Stored
    context: dict[str, Any] = {}


class Claimed(msgspec.Struct, frozen=True, kw_only=True, tag="claimed", omit_defaults=True):
    """`outside`, here and below: it came in by the HTTP API. Anybody may say anything there, so it
    counts only from the worker that holds the command."""

    execution_id: ExecutionId
    command_id: CommandId
    worker_id: WorkerId
    outside: bool = False


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done", omit_defaults=True):
    """`context`: paths inside the result that the broker routes on. `ctx`: what tasks set."""

    execution_id: ExecutionId
    command_id: CommandId
    worker_id: WorkerId
    stored: Stored | None = None
    context: dict[str, Any] = {}
    ctx: dict[str, Any] = {}
    duration_ms: float = 0.0
    frame_rows: int | None = None
    """Of a cursor loop: how many rows the command has claimed."""
    chunks: int = 0
    """How many chunks were sent before this: all of them must be recorded first."""
    outside: bool = False


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed", omit_defaults=True):
    execution_id: ExecutionId
    command_id: CommandId
    worker_id: WorkerId
    error: ToolError
    stored: Stored | None = None
    context: dict[str, Any] = {}
    ctx: dict[str, Any] = {}
    duration_ms: float = 0.0
    outside: bool = False


class Expired(msgspec.Struct, frozen=True, kw_only=True, tag="expired", omit_defaults=True):
    """The reaper saw the lease of this attempt run out, or found the command lost. A question: the
    broker looks at the row, which may have been renewed since."""

    execution_id: ExecutionId
    command_id: CommandId
    reason: str
    given_back: bool = False
    """The worker has let go of it by itself, as the row says."""


class Reconcile(msgspec.Struct, frozen=True, kw_only=True, tag="reconcile"):
    """The reaper saw an execution that does not move: look at it again."""

    execution_id: ExecutionId


class Barrier(msgspec.Struct, frozen=True, kw_only=True, tag="barrier"):
    """Close the epoch on this shard."""

    shard_id: ShardId
    epoch: EpochId


Message = (
    Start
    | Cancel
    | Pause
    | Resume
    | Retry
    | Signal
    | Due
    | Claimed
    | Parked
    | ChildEnded
    | Partial
    | Done
    | Failed
    | Expired
    | Reconcile
    | Barrier
)

_ids = msgspec.msgpack.Decoder(list[int])
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Message])


def encode_messages(messages: list[Message]) -> bytes:
    return _encoder.encode(messages)


def decode_messages(body: bytes) -> list[Message]:
    """Raises msgspec.DecodeError for a body that is none of ours."""
    try:
        return _decoder.decode(body)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


def encode_ids(execution_ids: list[ids.ExecutionId]) -> bytes:
    return _encoder.encode(execution_ids)


def decode_ids(body: bytes) -> list[ids.ExecutionId]:
    return [ids.ExecutionId(number) for number in _ids.decode(body)]
