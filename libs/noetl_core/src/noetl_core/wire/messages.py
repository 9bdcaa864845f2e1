"""What processes tell the broker. A body is a list of messages in msgpack: one message = one batch.

None of these is a fact yet. The broker checks each against the state and the lease, and records the
fact that follows from it; a message that comes twice changes nothing.
"""

from typing import Any

import msgspec

from noetl_core.domain.errors import ToolError
from noetl_core.domain.ids import (
    CatalogId,
    CommandId,
    EpochId,
    ExecutionId,
    ShardId,
    WorkerId,
)

BODY_BYTES_MAX = 512 * 1024


class Stored(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A result that is ready to be recorded: inline bytes, or the place a tier has put it."""

    tier: str
    size: int
    sha256: bytes
    inline: bytes | None = None
    uri: str | None = None
    media_type: str = "application/json"


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """A client wants an execution. `payload` is JSON, merged over the playbook's workload."""

    execution_id: ExecutionId
    catalog_id: CatalogId
    path: str
    version: int
    payload: Stored | None = None


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    execution_id: ExecutionId
    reason: str = ""


class Claimed(msgspec.Struct, frozen=True, kw_only=True, tag="claimed"):
    execution_id: ExecutionId
    command_id: CommandId
    worker_id: WorkerId


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done", omit_defaults=True):
    """`context`: paths inside the result that the broker routes on. `ctx`: what tasks set."""

    execution_id: ExecutionId
    command_id: CommandId
    worker_id: WorkerId
    stored: Stored | None = None
    context: dict[str, Any] = {}
    ctx: dict[str, Any] = {}
    duration_ms: float = 0.0


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed", omit_defaults=True):
    execution_id: ExecutionId
    command_id: CommandId
    worker_id: WorkerId
    error: ToolError
    stored: Stored | None = None
    context: dict[str, Any] = {}
    ctx: dict[str, Any] = {}
    duration_ms: float = 0.0


class Expired(msgspec.Struct, frozen=True, kw_only=True, tag="expired"):
    """The reaper saw the lease of this attempt run out, or found the command lost."""

    execution_id: ExecutionId
    command_id: CommandId
    reason: str


class Reconcile(msgspec.Struct, frozen=True, kw_only=True, tag="reconcile"):
    """The reaper saw an execution that does not move: look at it again."""

    execution_id: ExecutionId


class Barrier(msgspec.Struct, frozen=True, kw_only=True, tag="barrier"):
    """Close the epoch on this shard."""

    shard_id: ShardId
    epoch: EpochId


Message = Start | Cancel | Claimed | Done | Failed | Expired | Reconcile | Barrier

_ids = msgspec.msgpack.Decoder(list[int])
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Message])


def encode_messages(messages: list[Message]) -> bytes:
    return _encoder.encode(messages)


def decode_messages(body: bytes) -> list[Message]:
    """Raises msgspec.DecodeError for a body that is none of ours."""
    return _decoder.decode(body)


def encode_ids(execution_ids: list[ExecutionId]) -> bytes:
    return _encoder.encode(execution_ids)


def decode_ids(body: bytes) -> list[ExecutionId]:
    return [ExecutionId(number) for number in _ids.decode(body)]
