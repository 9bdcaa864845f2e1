"""The envelope of a result: what an event says about a payload that lives elsewhere."""

from typing import Any, Literal

import msgspec

from noetl_core.domain.ids import ExecutionId, RefId

CONTEXT_BYTES_MAX = 1024
"""What a worker may push into an envelope for routing; larger values stay behind the reference."""

INLINE_BYTES_MAX = 64 * 1024
"""Up to this size a result rides with the worker's message and is stored by the broker's commit."""

OutcomeStatus = Literal["ok", "error"]


class Reference(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a payload is. `ref_id` is the id of the event that recorded it.

    `db` is inline in `noetl.result_ref`, `object_store` is a file or object at `uri`, `eventlog` is
    the ordered results of a loop, read back from the log by `loop_id` = `ref_id`, `pages` is what
    the calls of a sequence collected, read back from the manifest `ref_id`.
    """

    ref_id: RefId
    type: Literal["db", "object_store", "eventlog", "pages"]
    uri: str = ""
    bytes: int = 0
    execution_id: ExecutionId | None = None
    """Where it belongs to another execution: a child, or the one this was forked from."""


class ParentReference(msgspec.Struct, frozen=True, kw_only=True):
    ref_id: RefId | None


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly what `chk_event_result_shape` lets into `event.result`.

    `context` maps a dotted path inside the payload to its value, for the paths that templates on
    the broker read (see domain/analysis.py).
    """

    status: OutcomeStatus
    reference: Reference | None = None
    parent_ref: ParentReference | None = None
    context: dict[str, Any] = {}
