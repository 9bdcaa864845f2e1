"""Executions: start, watch, cancel, and page through their events."""

import hashlib
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
from noetl_api_gateway.requests import (
    RequestError,
    execution_id_of,
    json_body,
    optional_json_body,
    query,
)
from noetl_core.domain.errors import ConflictError, NotFoundError, ToolError
from noetl_core.domain.ids import EventId, ExecutionId, ShardId
from noetl_core.domain.state import TERMINAL, ExecutionStatus
from noetl_core.store import catalog, event_read, execution, idempotency, inbox
from noetl_core.store.catalog import CatalogEntry
from noetl_core.store.execution import FROM_THE_NEWEST, Accepted, Cursor
from noetl_core.store.idempotency import Keyed
from noetl_core.store.postgres import Pool
from noetl_core.wire import http
from noetl_core.wire.http import IDEMPOTENCY_HEADER, PAYLOAD_BYTES_MAX
from noetl_core.wire.messages import Cancel, Start, Stored, decode_messages, encode_messages
from noetl_core.wire.subjects import inbox_wake

if TYPE_CHECKING:
    from asyncpg import Record

_CURSOR = re.compile(r"(?P<microseconds>[0-9]{1,17})-(?P<id>[0-9]{1,19})")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


async def start(gateway: Gateway, request: Request) -> Response:
    """202 is a promise: the request is committed, and whatever dies now, it will run."""
    asked = await json_body(request, http.ExecuteRequest)
    key = _idempotency_key(request, asked)
    payload = _stored(asked.payload)
    entry = await catalog.find(gateway.pool, asked.path, version=asked.version)
    if entry is None:
        raise not_in_catalog(asked.path, asked.version)
    execution_id = ExecutionId(gateway.mint())
    body = encode_messages([_start(execution_id, entry, payload)])
    if key is None:
        await _wake(gateway, await inbox.promise(gateway.pool, execution_id, body))
    else:
        wanted = Keyed(execution_id, _fingerprint(asked))
        earlier = await _promise_once(gateway, key, wanted, body)
        if earlier is not None:
            return await _repeated(gateway.pool, earlier)
    metrics.EXECUTIONS_ACCEPTED.add(1)
    return answer(202, _accepted(execution_id, entry))


async def read(gateway: Gateway, request: Request) -> Response:
    """One row by its key. With `wait`, the answer comes when the execution has ended."""
    execution_id = execution_id_of(request)
    seconds = query(request, http.ExecutionQuery).wait
    view = await find(gateway.pool, execution_id)
    if seconds and view.status not in TERMINAL:
        await gateway.ends.wait(execution_id, seconds=seconds)
        view = await find(gateway.pool, execution_id)
    return answer(200, view)


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
        items=[_view(row) for row in shown],
        next_cursor=_encode_cursor(shown[-1]) if more else None,
    )
    return answer(200, page)


async def events(gateway: Gateway, request: Request) -> Response:
    """The log in its order. The last page of a running execution is not the end: ask again."""
    execution_id = execution_id_of(request)
    asked = query(request, http.EventsQuery)
    rows = await event_read.page(
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
    await _wake(gateway, await inbox.promise(gateway.pool, execution_id, encode_messages([wish])))
    return answer(202, http.CancelAccepted(execution_id=str(execution_id)))


async def find(pool: Pool, execution_id: ExecutionId) -> http.ExecutionView:
    """The row, or what is known of an execution that the projection has not come to yet."""
    row = await execution.read(pool, execution_id)
    if row is not None:
        return _view(row)
    accepted = await execution.accepted(pool, execution_id)
    if accepted is None:
        raise NotFoundError(f"there is no execution {execution_id}")
    return _view_of_accepted(execution_id, accepted)


def _view(row: "Record") -> http.ExecutionView:
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


def _event(row: "Record") -> http.EventView:
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
        context=as_is(row["context"]),
        result=_envelope(row["result"]),
        meta=as_is(row["meta"]),
        error=as_is(row["error"]),
    )


def _envelope(json: str | None) -> dict[str, Any] | None:
    """The one document of an event that holds ids, which are strings on this side."""
    if json is None:
        return None
    envelope: dict[str, Any] = msgspec.json.decode(json)
    for name in ("reference", "parent_ref"):
        reference = envelope.get(name)
        if reference is not None:
            envelope[name] = {**reference, "ref_id": _id(reference["ref_id"])}
    return envelope


def _id(value: int | None) -> str | None:
    return None if value is None else str(value)


def _stored(payload: dict[str, Any]) -> Stored | None:
    """The payload as the broker will store it: inline, whatever its size up to the limit."""
    if not payload:
        return None
    try:
        msgspec.msgpack.encode(payload)
    except OverflowError:
        raise RequestError(422, "a number has more than 64 bits", field="payload") from None
    inline = msgspec.json.encode(payload)
    if len(inline) > PAYLOAD_BYTES_MAX:
        raise RequestError(413, f"the payload has more than {PAYLOAD_BYTES_MAX} bytes")
    sha256 = hashlib.sha256(inline).digest()
    return Stored(tier="db", size=len(inline), sha256=sha256, inline=inline)


def _start(execution_id: ExecutionId, entry: CatalogEntry, payload: Stored | None) -> Start:
    return Start(
        execution_id=execution_id,
        catalog_id=entry.catalog_id,
        path=entry.path,
        version=entry.version,
        payload=payload,
    )


def _accepted(execution_id: ExecutionId, entry: CatalogEntry) -> http.ExecutionAccepted:
    return http.ExecutionAccepted(
        execution_id=str(execution_id),
        catalog_id=str(entry.catalog_id),
        path=entry.path,
        version=entry.version,
    )


def _idempotency_key(request: Request, asked: http.ExecuteRequest) -> str | None:
    header = request.headers.get(IDEMPOTENCY_HEADER)
    if header is None:
        return asked.idempotency_key
    if asked.idempotency_key not in (None, header):
        raise RequestError(422, "the header and the body give different keys")
    try:
        return msgspec.convert(header, http.IdempotencyKey)
    except msgspec.ValidationError as error:
        raise RequestError(422, f"{IDEMPOTENCY_HEADER}: {error}") from None


def _fingerprint(asked: http.ExecuteRequest) -> bytes:
    """Of what was asked, not of what it led to: a version may have been added since."""
    asked = msgspec.structs.replace(asked, idempotency_key=None)
    return hashlib.sha256(msgspec.json.encode(asked, order="sorted")).digest()


async def _promise_once(
    gateway: Gateway, key: str, wanted: Keyed, body: bytes
) -> ExecutionId | None:
    """Commit the request together with its key; gives the execution that has the key already."""
    shard = await idempotency.promise_once(gateway.pool, key, wanted, body)
    if shard is not None:
        await _wake(gateway, shard)
        return None
    earlier = await idempotency.find(gateway.pool, key)
    assert earlier is not None, "a key is never given back"
    if earlier.fingerprint != wanted.fingerprint:
        raise RequestError(422, "this key belongs to another request", field="idempotency_key")
    return earlier.execution_id


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


async def _wake(gateway: Gateway, shard: ShardId) -> None:
    # After the commit: a lost wake-up costs the broker's next look, 200 ms.
    await gateway.bus.wake(inbox_wake(shard))


def _encode_cursor(row: "Record") -> str:
    microseconds = (row["started_at"] - _EPOCH) // _MICROSECOND
    return f"{microseconds}-{row['execution_id']}"


def _decode_cursor(text: str) -> Cursor:
    found = _CURSOR.fullmatch(text)
    if found is None or int(found["id"]) > http.ID_MAX:
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
        problems=(404, 422),
    ),
    Endpoint(
        method="GET",
        path="/api/executions/{execution_id}/events",
        tag="executions",
        summary="Page through the log of an execution",
        handle=events,
        query=http.EventsQuery,
        answers={200: http.EventPage},
        problems=(404, 422),
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
