"""The brief of a command: everything a worker needs to run it, and nothing it does not read.

It is the payload of the row in `noetl.command`. The worker has the playbook (by `catalog_id`) and the
result store; the brief carries what is true of this execution at this moment.
"""

from typing import Any

import msgspec

from noetl_core.domain.envelope import Envelope
from noetl_core.domain.ids import CatalogId, LoopId, StepName

ELEMENT_BYTES_MAX = 4096
"""A larger element is not copied into the brief: the worker reads it from its part."""


class Element(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One item of a loop. Without `value`, it is number `offset` of part `part`."""

    index: int
    total: int
    loop_id: LoopId
    part: int
    offset: int
    is_inline: bool = True
    value: Any = None


class Brief(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    catalog_id: CatalogId
    step: StepName
    visit: int
    attempt: int
    element: Element | None = None
    ctx: dict[str, Any] = {}
    steps: dict[StepName, Envelope] = {}
    payload: Envelope | None = None
    """The execution's payload, merged over the playbook's workload."""
    parent_ref: int | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Brief)


def encode_brief(brief: Brief) -> bytes:
    return _encoder.encode(brief)


def decode_brief(body: bytes) -> Brief:
    return _decoder.decode(body)
