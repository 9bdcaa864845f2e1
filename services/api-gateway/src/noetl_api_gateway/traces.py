"""Where a result comes from: the chain of results from a step back to the beginning.

Every envelope names the result before it (`parent_ref`). The walk asks for one event and one row of
results at each of them, in the log or in the archive that has taken its place.
"""

from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from noetl_api_gateway import executions
from noetl_api_gateway.answers import answer
from noetl_api_gateway.endpoint import Endpoint, Gateway
from noetl_api_gateway.requests import execution_id_of, text_of
from noetl_core.domain.envelope import Envelope
from noetl_core.domain.errors import NotFoundError
from noetl_core.domain.ids import ExecutionId, RefId, StepName
from noetl_core.store import execution
from noetl_core.store.result_ref import StoredRow
from noetl_core.wire import http

LINKS_MAX = 1_000

_PAYLOADS = ("db", "object_store")
"""What is behind any other type is many results, each with a row of its own."""

_decode_envelope = msgspec.json.Decoder(Envelope).decode


class _Recorded(NamedTuple):
    """An envelope, and the event that recorded it in the log of `execution_id`."""

    execution_id: ExecutionId
    envelope: Envelope
    event: Any
    step: str | None


async def trace(gateway: Gateway, request: Request) -> Response:
    """The chain of results that led to the result of a step, the newest first."""
    execution_id = execution_id_of(request)
    step = text_of(request, "step")
    found: _Recorded | None = await _result_of(gateway, execution_id, step)
    links: list[http.TraceLink] = []
    seen: set[tuple[ExecutionId, RefId]] = set()
    is_complete = True
    while found is not None:
        links.append(await _link(gateway, found))
        parent = _parent(found.envelope)
        if parent is None:
            break
        is_complete = len(links) < LINKS_MAX and (found.execution_id, parent) not in seen
        seen.add((found.execution_id, parent))
        found = await _before(gateway, found, parent) if is_complete else None
        is_complete = is_complete and found is not None
    body = http.Trace(
        execution_id=str(execution_id), step=step, links=links, is_complete=is_complete
    )
    return answer(200, body)


async def _result_of(gateway: Gateway, execution_id: ExecutionId, name: str) -> _Recorded:
    state = await execution.read_state(gateway.pool, execution_id)
    if state is None:
        await executions.find(gateway.pool, execution_id)
        raise NotFoundError(f"execution {execution_id} has not entered a step {name!r} yet")
    step = state.steps.get(StepName(name))
    if step is None:
        raise NotFoundError(f"execution {execution_id} has not entered a step {name!r}")
    if step.result is None:
        raise NotFoundError(f"step {name!r} of execution {execution_id} has no result yet")
    reference = step.result.reference
    event = None
    if reference is not None:
        event = await gateway.results.history.recorded_as(
            gateway.pool, execution_id, reference.ref_id
        )
    return _Recorded(execution_id, step.result, event, name)


async def _before(gateway: Gateway, link: _Recorded, ref_id: RefId) -> _Recorded | None:
    """Who recorded the result before this one: this execution, or the one it was forked from."""
    reference = link.envelope.reference
    elsewhere = None if reference is None else reference.execution_id
    for execution_id in filter(None, (link.execution_id, elsewhere)):
        event = await gateway.results.history.recorded_as(gateway.pool, execution_id, ref_id)
        if event is not None:
            return _Recorded(
                execution_id, _decode_envelope(event["result"]), event, event["node_name"]
            )
    return None


async def _link(gateway: Gateway, found: _Recorded) -> http.TraceLink:
    event, reference = found.event, found.envelope.reference
    owner = found.execution_id
    row: StoredRow | None = None
    if reference is not None:
        owner = reference.execution_id or owner
    if reference is not None and reference.type in _PAYLOADS:
        rows = await gateway.results.history.find(gateway.pool, owner, [reference.ref_id])
        row = rows.get(reference.ref_id)
    return http.TraceLink(
        execution_id=str(found.execution_id),
        step=found.step,
        command_id=None if event is None else event["command_id"],
        attempt=None if event is None else event["attempt"],
        event_id=None if event is None else str(event["event_id"]),
        event_type=None if event is None else event["event_type"],
        recorded_at=None if event is None else event["created_at"],
        status=found.envelope.status,
        ref_id=None if reference is None else str(reference.ref_id),
        ref_execution_id=None if reference is None else str(owner),
        type=None if reference is None else reference.type,
        tier=None if row is None else row.tier,
        uri=None if row is None else row.uri,
        bytes=_bytes(found.envelope, row),
        media_type=None if row is None else row.media_type,
        sha256=None if row is None or row.sha256 is None else row.sha256.hex(),
        expires_at=None if row is None else row.expires_at,
        parent_ref_id=None if (parent := _parent(found.envelope)) is None else str(parent),
    )


def _bytes(envelope: Envelope, row: StoredRow | None) -> int | None:
    if row is not None:
        return row.size
    return None if envelope.reference is None else envelope.reference.bytes or None


def _parent(envelope: Envelope) -> RefId | None:
    return None if envelope.parent_ref is None else envelope.parent_ref.ref_id


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/api/executions/{execution_id}/trace/{step:path}",
        tag="executions",
        summary="Read the chain of results that led to the result of a step",
        handle=trace,
        answers={200: http.Trace},
        problems=(404, 503),
    ),
)
