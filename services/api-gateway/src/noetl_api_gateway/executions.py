"""Executions: start, watch, cancel, and page through their events."""

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from noetl_api_gateway import metrics
from noetl_api_gateway.answers import answer, as_is
from noetl_api_gateway.catalog import not_in_catalog
from noetl_api_gateway.endpoint import Endpoint, Gateway
from noetl_api_gateway.promises import (
    fingerprint,
    idempotency_key,
    promise,
    promise_once,
    stored,
)
from noetl_api_gateway.requests import (
    RequestError,
    execution_id_of,
    json_body,
    optional_json_body,
    query,
)
from noetl_api_gateway.shown import until_shown
from noetl_api_gateway.standing import at_this_moment
from noetl_core.domain.errors import ConflictError, NotFoundError, ToolError
from noetl_core.domain.ids import ID_MAX, EventId, ExecutionId
from noetl_core.domain.state import TERMINAL, ExecutionStatus
from noetl_core.store import catalog, execution
from noetl_core.store.catalog import CatalogEntry
from noetl_core.store.execution import FROM_THE_NEWEST, Accepted, Cursor
from noetl_core.store.idempotency import Keyed
from noetl_core.store.postgres import Pool
from noetl_core.wire import http
from noetl_core.wire.http import IDEMPOTENCY_HEADER
from noetl_core.wire.messages import Cancel, Start, Stored, decode_messages

if TYPE_CHECKING:
    from asyncpg import Record

_CURSOR = re.compile(r"(?P<microseconds>[0-9]{1,17})-(?P<id>[0-9]{1,19})")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


async def start(gateway: Gateway, request: Request) -> Response:
    """202 is a promise: the request is committed, and whatever dies now, it will run."""
    asked = await json_body(request, http.ExecuteRequest)
    key = idempotency_key(request, asked.idempotency_key)
    payload = stored(asked.payload, field="payload") if asked.payload else None
    entry = await catalog.find(gateway.pool, asked.path, version=asked.version)
    if entry is None:
        raise not_in_catalog(asked.path, asked.version)
    execution_id = ExecutionId(gateway.mint())
    start = _start(execution_id, entry, payload)
    wanted = fingerprint(msgspec.structs.replace(asked, idempotency_key=None))
    return await begin(gateway, start, key=key, wanted=wanted)


async def begin(gateway: Gateway, start: Start, *, key: str | None, wanted: bytes) -> Response:
    """Promise an execution. `wanted` is the fingerprint of the request that `key` belongs to."""
    if key is None:
        await promise(gateway, start.execution_id, [start])
    else:
        keyed = Keyed(start.execution_id, wanted)
        earlier = await promise_once(gateway, key, keyed, start)
        if earlier is not None:
            return await _repeated(gateway.pool, earlier)
    metrics.EXECUTIONS_ACCEPTED.add(1)
    return answer(202, _accepted(start))


async def read(gateway: Gateway, request: Request) -> Response:
    """One row by its key. With `wait`, the answer comes when the execution has ended.

    With `min_event_id` it is not older than that event.
    """
    execution_id = execution_id_of(request)
    asked = query(request, http.ExecutionQuery)
    view = await find(gateway.pool, execution_id)
    if asked.min_event_id > int(view.last_event_id or 0):
        await until_shown(gateway, execution_id, asked.min_event_id, seconds=asked.wait)
        view = await find(gateway.pool, execution_id)
    if asked.wait and view.status not in TERMINAL:
        await gateway.ends.wait(execution_id, seconds=asked.wait)
        view = await find(gateway.pool, execution_id)
    return answer(200, (await at_this_moment(gateway.pool, [view]))[0])


async def list_newest(gateway: Gateway, request: Request) -> Response:
    asked = query(request, http.ExecutionsQuery)
    rows = await execution.newest(
        gateway.pool,
        status=asked.status,
        path=asked.path,
        before=FROM_THE_NEWEST if asked.cursor is None else _decode_cursor(asked.cursor),
        limit=asked.limit + 1,
    )
    shown = rows[: asked.limit]
    more = len(rows) > asked.limit
    page = http.ExecutionPage(
        items=await at_this_moment(gateway.pool, [view_of(row) for row in shown]),
        next_cursor=_encode_cursor(shown[-1]) if more else None,
    )
    return answer(200, page)


async def events(gateway: Gateway, request: Request) -> Response:
    """The log in its order. The last page of a running execution is not the end: ask again."""
    execution_id = execution_id_of(request)
    asked = query(request, http.EventsQuery)
    rows = await gateway.results.history.page(
        gateway.pool, execution_id, after=EventId(asked.after), limit=asked.limit + 1
    )
    if not rows:
        await find(gateway.pool, execution_id)
    shown = rows[: asked.limit]
    page = http.EventPage(
        items=[_event(row) for row in shown],
        next_after=str(shown[-1]["event_id"]) if len(rows) > asked.limit else None,
    )
    return answer(200, page)


async def cancel(gateway: Gateway, request: Request) -> Response:
    execution_id = execution_id_of(request)
    asked = await optional_json_body(request, http.CancelRequest)
    view = await find(gateway.pool, execution_id)
    if view.status in TERMINAL:
        raise ConflictError(f"execution {execution_id} has ended already: {view.status}")
    wish = Cancel(execution_id=execution_id, reason=asked.reason)
    await promise(gateway, execution_id, [wish])
    return answer(202, http.CancelAccepted(execution_id=str(execution_id)))


async def find(pool: Pool, execution_id: ExecutionId) -> http.ExecutionView:
    """The row, or what is known of an execution that the projection has not come to yet."""
    row = await execution.read(pool, execution_id)
    if row is not None:
        return view_of(row)
    accepted = await execution.accepted(pool, execution_id)
    if accepted is None:
        raise NotFoundError(f"there is no execution {execution_id}")
    return _view_of_accepted(execution_id, accepted)


def view_of(row: "Record") -> http.ExecutionView:
    return http.ExecutionView(
        execution_id=str(row["execution_id"]),
        catalog_id=str(row["catalog_id"]),
        path=row["path"],
        version=row["version"],
        status=row["status"],
        progress=as_is(row["progress"]),
        waiting_on=row["waiting_on"],
        error=as_is(row["error"]),
        last_event_type=row["last_event_type"],
        last_node_name=row["last_node_name"],
        last_event_id=str(row["last_projected_event_id"]),
        parent_execution_id=_id(row["parent_execution_id"]),
        started_at=row["started_at"],
        updated_at=row["updated_at"],
        ended_at=row["ended_at"],
    )


def _view_of_accepted(execution_id: ExecutionId, accepted: Accepted) -> http.ExecutionView:
    start = _start_in(accepted.body)
    return http.ExecutionView(
        execution_id=str(execution_id),
        catalog_id=str(accepted.catalog_id if start is None else start.catalog_id),
        path=(accepted.path or "") if start is None else start.path,
        version=(accepted.version or 0) if start is None else start.version,
        status=_ACCEPTED_STATUS[accepted.found_in],
        waiting_on=_WAITING_ON.get(accepted.found_in),
        error=_parked_error(accepted.reason),
        started_at=accepted.accepted_at,
        updated_at=accepted.accepted_at,
    )


_ACCEPTED_STATUS: dict[str, ExecutionStatus] = {
    "inbox": "PENDING",
    "log": "RUNNING",
    "dead_letter": "FAILED",
}
_WAITING_ON = {
    "inbox": "waiting for the broker to start it",
    "log": "waiting for the projection to show it",
}


def _start_in(body: bytes | None) -> Start | None:
    """The request as it was accepted; None in what was parked because nobody could read it."""
    if body is None:
        return None
    try:
        messages = decode_messages(body)
    except msgspec.DecodeError:
        return None
    return next((message for message in messages if isinstance(message, Start)), None)


def _parked_error(reason: str | None) -> dict[str, Any] | None:
    if reason is None:
        return None
    parked = ToolError(kind="parked", message=f"the request could not be processed: {reason}")
    error: dict[str, Any] = msgspec.to_builtins(parked)
    return error


def _event(row: Any) -> http.EventView:
    return http.EventView(
        event_id=str(row["event_id"]),
        event_type=row["event_type"],
        created_at=row["created_at"],
        status=row["status"],
        node_name=row["node_name"],
        command_id=row["command_id"],
        loop_id=_id(row["loop_id"]),
        iter_index=row["iter_index"],
        attempt=row["attempt"],
        parent_event_id=_id(row["parent_event_id"]),
        parent_execution_id=_id(row["parent_execution_id"]),
        catalog_id=_id(row["catalog_id"]),
        epoch_id=_id(row["epoch_id"]),
        context=_context(row["context"]),
        result=_decoded_envelope(row["result"]),
        meta=_meta(row["meta"], row["epoch_id"]),
        error=as_is(row["error"]),
    )


def _meta(json: str | None, epoch_id: int | None) -> dict[str, Any] | None:
    """With the epoch in which the event was recorded, as those expect it who read it there."""
    if epoch_id is None:
        meta: dict[str, Any] | None = as_is(json)
        return meta
    return {**({} if json is None else msgspec.json.decode(json)), "epoch_id": str(epoch_id)}


# What a fact says in its context that is an id, and so a string on this side.
_IDS_IN_CONTEXT = ("child", "base", "collection_id", "sequence", "signal_id", "origin", "barrier")


def _context(json: str | None) -> dict[str, Any] | None:
    if json is None:
        return None
    context: dict[str, Any] = msgspec.json.decode(json)
    for name in _IDS_IN_CONTEXT:
        if isinstance(context.get(name), int):
            context[name] = str(context[name])
    if "given" in context:
        context["given"] = [_brought(given) for given in context["given"]]
    if "again" in context:
        context["again"] = _with_ids(context["again"], "sequence")
    if "steps" in context:
        context["steps"] = {step: _envelope(result) for step, result in context["steps"].items()}
    return _brought(context)


def _brought(given: dict[str, Any]) -> dict[str, Any]:
    """What a token has brought along: ids are strings, also of the chunk that it carries."""
    chunk = given.get("chunk")
    carried = {} if chunk is None else {"chunk": {**chunk, "result": _envelope(chunk["result"])}}
    return {**_with_ids(given, "parent_ref"), **carried}


def _decoded_envelope(json: str | None) -> dict[str, Any] | None:
    return None if json is None else _envelope(msgspec.json.decode(json))


def _envelope(envelope: dict[str, Any]) -> dict[str, Any]:
    ids = {
        name: _with_ids(envelope[name], "ref_id", "execution_id")
        for name in ("reference", "parent_ref")
        if envelope.get(name) is not None
    }
    return {**envelope, **ids}


def _with_ids(document: dict[str, Any], *names: str) -> dict[str, Any]:
    ids = {name: str(document[name]) for name in names if document.get(name) is not None}
    return {**document, **ids}


def _id(value: int | None) -> str | None:
    return None if value is None else str(value)


def _start(execution_id: ExecutionId, entry: CatalogEntry, payload: Stored | None) -> Start:
    return Start(
        execution_id=execution_id,
        catalog_id=entry.catalog_id,
        path=entry.path,
        version=entry.version,
        payload=payload,
    )


def _accepted(start: Start) -> http.ExecutionAccepted:
    return http.ExecutionAccepted(
        execution_id=str(start.execution_id),
        catalog_id=str(start.catalog_id),
        path=start.path,
        version=start.version,
    )


async def _repeated(pool: Pool, execution_id: ExecutionId) -> Response:
    view = await find(pool, execution_id)
    body = http.ExecutionAccepted(
        execution_id=view.execution_id,
        catalog_id=view.catalog_id,
        path=view.path,
        version=view.version,
        status=view.status,
        repeated=True,
    )
    return answer(202, body)


def _encode_cursor(row: "Record") -> str:
    microseconds = (row["started_at"] - _EPOCH) // _MICROSECOND
    return f"{microseconds}-{row['execution_id']}"


def _decode_cursor(text: str) -> Cursor:
    found = _CURSOR.fullmatch(text)
    if found is None or int(found["id"]) > ID_MAX:
        raise RequestError(422, "not a cursor that a page gave", field="cursor")
    try:
        started_at = _EPOCH + int(found["microseconds"]) * _MICROSECOND
    except OverflowError:
        raise RequestError(422, "not a cursor that a page gave", field="cursor") from None
    return Cursor(started_at, ExecutionId(int(found["id"])))


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/api/execute",
        tag="executions",
        summary="Start an execution of a playbook",
        handle=start,
        body=http.ExecuteRequest,
        headers={IDEMPOTENCY_HEADER: "A repeated request with the same key starts nothing new."},
        answers={202: http.ExecutionAccepted},
        problems=(400, 404, 413, 415, 422),
    ),
    Endpoint(
        method="GET",
        path="/api/executions",
        tag="executions",
        summary="List executions from the newest to the oldest",
        handle=list_newest,
        query=http.ExecutionsQuery,
        answers={200: http.ExecutionPage},
        problems=(422,),
    ),
    Endpoint(
        method="GET",
        path="/api/executions/{execution_id}",
        tag="executions",
        summary="Read the status of an execution, or wait for its end",
        handle=read,
        query=http.ExecutionQuery,
        answers={200: http.ExecutionView},
        problems=(404, 422, 504),
    ),
    Endpoint(
        method="GET",
        path="/api/executions/{execution_id}/events",
        tag="executions",
        summary="Page through the log of an execution",
        handle=events,
        query=http.EventsQuery,
        answers={200: http.EventPage},
        problems=(404, 422, 503),
    ),
    Endpoint(
        method="POST",
        path="/api/executions/{execution_id}/cancel",
        tag="executions",
        summary="Ask for an execution to be cancelled",
        handle=cancel,
        body=http.CancelRequest,
        body_required=False,
        answers={202: http.CancelAccepted},
        problems=(400, 404, 409, 413, 415, 422),
    ),
)
