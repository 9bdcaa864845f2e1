"""The brief of a command: everything a worker needs to run it, and nothing it does not read.

It is the payload of the row in `noetl.command`. The worker has the playbook (by `catalog_id`) and
the result store; the brief carries what is true of this execution at this moment.
"""

from typing import Any

import msgspec

from noetl_core.domain.analysis import Reads, reads_of
from noetl_core.domain.envelope import Envelope
from noetl_core.domain.errors import ToolError
from noetl_core.domain.events import CommandIssued
from noetl_core.domain.fold import loop_of
from noetl_core.domain.ids import CatalogId, LoopId, StepName, visit_id
from noetl_core.domain.known import Known
from noetl_core.domain.playbook import Playbook
from noetl_core.domain.state import ExecutionState, LoopState, Visit

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
    errors: dict[StepName, ToolError] = {}
    """Why steps that it reads have failed."""
    payload: Envelope | None = None
    """The execution's payload, merged over the playbook's workload."""
    parent_ref: int | None = None
    input: dict[str, Any] = {}
    """What the arc brought along; it goes over the step's own input."""
    call: dict[str, Any] = {}
    """What goes over the fields of the tool: the call of the next page."""
    page: int = 1
    chunks: int = 0
    """How many chunks of a streamed result are recorded already."""
    iter_parent: dict[str, Any] = {}


def brief_for(
    playbook: Playbook, state: ExecutionState, fact: CommandIssued, known: Known
) -> Brief:
    """Raises ReferenceNeeded when the part of the collection with this element is not loaded."""
    reads = reads_of(playbook, fact.step)
    visit = state.visits[visit_id(fact.step, fact.visit)]
    return Brief(
        catalog_id=state.catalog_id,
        step=fact.step,
        visit=fact.visit,
        attempt=fact.attempt,
        element=None if fact.iter_index is None else _element(state, fact, fact.iter_index, known),
        ctx=_ctx(state, reads),
        steps=_results(state, reads, visit),
        errors={
            name: step.error
            for name in reads.steps
            if (step := state.steps.get(name)) is not None and step.error is not None
        },
        payload=state.payload if reads.needs_payload else None,
        parent_ref=visit.parent_ref,
        input=visit.input,
        call=fact.call,
        page=fact.page,
        chunks=fact.chunks,
        iter_parent=state.iter_parent,
    )


def _results(state: ExecutionState, reads: Reads, visit: Visit) -> dict[StepName, Envelope]:
    """To a token that carries a chunk, the step it comes from means that chunk."""
    results = {
        name: step.result
        for name in reads.steps
        if (step := state.steps.get(name)) is not None and step.result is not None
    }
    if visit.chunk is not None:
        results[visit.chunk.step] = visit.chunk.result
    return results


def _ctx(state: ExecutionState, reads: Reads) -> dict[str, Any]:
    if reads.ctx_keys is None:
        return state.ctx
    return {key: state.ctx[key] for key in reads.ctx_keys if key in state.ctx}


def element_of(loop: LoopState, index: int, known: Known) -> Any:
    part, offset = divmod(index, loop.part_size)
    return known.part(loop.collection_id or loop.loop_id, part)[offset]


def _element(
    state: ExecutionState, fact: CommandIssued, index: int, known: Known
) -> Element | None:
    loop = loop_of(state, fact.step, fact.visit)
    if loop.is_cursor:
        return Element(index=index, total=0, loop_id=loop.loop_id, part=0, offset=0)
    part, offset = divmod(index, loop.part_size)
    value = element_of(loop, index, known)
    is_inline = _is_small(value)
    return Element(
        index=index,
        total=loop.base_done + loop.total,
        loop_id=loop.collection_id or loop.loop_id,
        part=part,
        offset=offset,
        is_inline=is_inline,
        value=value if is_inline else None,
    )


def _is_small(value: Any) -> bool:
    try:
        return len(_encoder.encode(value)) <= ELEMENT_BYTES_MAX
    except OverflowError:  # a number beyond 64 bits: its part can hold it, a brief cannot
        return False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Brief)


def encode_brief(brief: Brief) -> bytes:
    return _encoder.encode(brief)


def decode_brief(body: bytes) -> Brief:
    return _decoder.decode(body)
