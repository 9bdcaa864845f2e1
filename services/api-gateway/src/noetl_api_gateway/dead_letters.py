"""What was set aside because it could not be processed: look at it, try it again, or discard it.

Who sets aside, and what trying again means
  broker      messages that it could not act on. It has ended their execution with that reason,
              so they are of no use any more: the execution goes on from where it ended instead,
              and one that never got further than its start is started anew. Where the execution
              has not ended, the messages go into its inbox again.
  command     a command that was lost too often. Its execution goes on from where it ended.
  reaper      an execution that nothing could move. The broker looks at it again.
  projection  an event that could not be shown. The log has it: rebuild the row instead.
              `projection.differs` is what stood in a row that was not what its log says; the row
              was written anew when that was found, so there is nothing to do again.
"""

from base64 import b64encode
from typing import Any

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response

from noetl_api_gateway.answers import answer
from noetl_api_gateway.control import retry_of
from noetl_api_gateway.endpoint import Endpoint, Gateway
from noetl_api_gateway.executions import find
from noetl_api_gateway.promises import wake
from noetl_api_gateway.requests import query
from noetl_core.domain.errors import ConflictError, NotFoundError
from noetl_core.domain.ids import ID_MAX, EventId, ExecutionId, ShardId
from noetl_core.domain.state import TERMINAL
from noetl_core.store import audit, dead_letter, event, inbox
from noetl_core.store.dead_letter import DeadLetter
from noetl_core.store.postgres import Connection, in_transaction
from noetl_core.wire import http
from noetl_core.wire.messages import Barrier, Message, Start, decode_messages, encode_messages

ACTOR = "api"
_IDS = frozenset(
    {
        *("execution_id", "catalog_id", "child_id", "signal_id", "origin", "ref_id"),
        # Of an event that could not be shown, and of a row that was wrong.
        *("event_id", "parent_event_id", "parent_execution_id", "loop_id", "epoch_id"),
        *("last_event_id", "last_projected_event_id", "epoch", "child", "collection_id", "base"),
        *("sequence", "parent_ref"),
    }
)

log = structlog.get_logger()


async def list_newest(gateway: Gateway, request: Request) -> Response:
    asked = query(request, http.DeadLettersQuery)
    execution_id = None if asked.execution_id is None else ExecutionId(asked.execution_id)
    found = await dead_letter.page(
        gateway.pool,
        before=asked.before,
        execution_id=execution_id,
        source=asked.source,
        limit=asked.limit + 1,
    )
    shown = found[: asked.limit]
    page = http.DeadLetterPage(
        items=[http.DeadLetterItem(**_fields(one)) for one in shown],
        next_before=str(shown[-1].dead_letter_id) if len(found) > asked.limit else None,
    )
    return answer(200, page)


async def read(gateway: Gateway, request: Request) -> Response:
    found = await _find(gateway, _id_of(request))
    try:
        messages, unreadable = _shown(found), None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        messages, unreadable = None, f"this version of NoETL cannot read it: {error}"
    document = http.DeadLetterDocument(**_fields(found), messages=messages, unreadable=unreadable)
    return answer(200, document)


async def retry(gateway: Gateway, request: Request) -> Response:
    """In one transaction: whatever dies now, it is either still here or on its way.

    The execution may end while it is on its way, and then the broker drops it. So the audit keeps
    the body: what was set aside is never gone without anybody having said so.
    """
    dead_letter_id = _id_of(request)
    found = await _find(gateway, dead_letter_id)
    execution_id, messages, did = await _second_try(gateway, found)

    async def send(conn: Connection) -> ShardId:
        if await dead_letter.remove(conn, dead_letter_id) is None:
            raise _gone(dead_letter_id)
        shard = await inbox.promise(conn, execution_id, encode_messages(messages))
        await audit.record(
            conn, actor=ACTOR, action="dead_letter.retried", subject=str(dead_letter_id),
            details={**_audited(found), "did": did, "body": b64encode(found.body).decode()},
        )  # fmt: skip
        return shard

    async with gateway.pool.acquire() as conn:
        shard = await in_transaction(conn, send)
    await wake(gateway, shard)
    log.info("dead_letter.retried", dead_letter_id=dead_letter_id, execution_id=execution_id)
    body = http.DeadLetterRetried(
        dead_letter_id=str(dead_letter_id), execution_id=str(execution_id), did=did
    )
    return answer(202, body)


async def discard(gateway: Gateway, request: Request) -> Response:
    dead_letter_id = _id_of(request)

    async def remove(conn: Connection) -> None:
        found = await dead_letter.remove(conn, dead_letter_id)
        if found is None:
            raise _gone(dead_letter_id)
        await audit.record(
            conn, actor=ACTOR, action="dead_letter.discarded", subject=str(dead_letter_id),
            details=_audited(found),
        )  # fmt: skip

    async with gateway.pool.acquire() as conn:
        await in_transaction(conn, remove)
    log.info("dead_letter.discarded", dead_letter_id=dead_letter_id)
    return answer(200, http.DeadLetterDiscarded(dead_letter_id=str(dead_letter_id)))


async def _second_try(
    gateway: Gateway, found: DeadLetter
) -> tuple[ExecutionId, list[Message], str]:
    """Which execution is told what, and that in words. Refuses what would lead to nothing."""
    if found.source == "projection":
        detail = f"noetl db rebuild-projection --execution {found.execution_id}"
        raise ConflictError(f"the log has this event: run `{detail}`, then discard this")
    if found.source == "projection.differs":
        raise ConflictError("the row was written anew when it was found: discard this")
    messages = _messages(found)
    execution_id = found.execution_id or _execution_of(messages)
    view = await _view(gateway, execution_id)
    if view is None or view.status not in TERMINAL:
        shown = EventId(int((view and view.last_event_id) or 0))
        # The broker ends an execution in the commit that sets its messages aside, and the status
        # follows: in between it would be sent to an execution that takes nothing any more.
        if await event.has_ended_since(gateway.pool, execution_id, shown):
            raise ConflictError(
                f"execution {execution_id} has just ended and its status does not show it yet: "
                "try again in a moment"
            )
        if found.source == "command":
            raise ConflictError(f"execution {execution_id} went on without it: discard it")
        return execution_id, messages, "it is in the inbox of its execution again"
    if view.status != "FAILED":
        detail = f"execution {execution_id} has ended as {view.status}: nothing follows from this"
        raise ConflictError(f"{detail} any more; discard it")
    start = next((one for one in messages if isinstance(one, Start)), None)
    if start is None:
        message = await retry_of(gateway, view, http.RetryRequest())
        return execution_id, [message], "its execution goes on from where it ended"
    if start.parent is not None:
        parent = start.parent.execution_id
        raise ConflictError(
            f"execution {parent} started it: let that go on, `noetl retry {parent}`"
        )
    anew = msgspec.structs.replace(start, execution_id=ExecutionId(gateway.mint()))
    return anew.execution_id, [anew], f"started anew: execution {execution_id} has failed"


def _messages(found: DeadLetter) -> list[Message]:
    try:
        return decode_messages(found.body)
    except msgspec.DecodeError as error:
        detail = f"this version of NoETL cannot read it ({error}): run the version that wrote it"
        raise ConflictError(f"{detail}, or discard it") from None


def _execution_of(messages: list[Message]) -> ExecutionId:
    """Of what was set aside without saying whose it is."""
    about = {one.execution_id for one in messages if not isinstance(one, Barrier)}
    if len(about) != 1:
        raise ConflictError("it is not about one execution: discard it")
    return about.pop()


async def _view(gateway: Gateway, execution_id: ExecutionId) -> http.ExecutionView | None:
    try:
        return await find(gateway.pool, execution_id)
    except NotFoundError:
        return None


async def _find(gateway: Gateway, dead_letter_id: int) -> DeadLetter:
    found = await dead_letter.read(gateway.pool, dead_letter_id)
    if found is None:
        raise _gone(dead_letter_id)
    return found


def _gone(dead_letter_id: int) -> NotFoundError:
    detail = "it never was, or it was retried or discarded"
    return NotFoundError(f"there is no dead letter {dead_letter_id}: {detail}")


def _id_of(request: Request) -> int:
    text: str = request.path_params["dead_letter_id"]
    if text.isascii() and text.isdecimal() and len(text) <= len(str(ID_MAX)):
        number = int(text)
        if number <= ID_MAX:
            return number
    raise NotFoundError(f"{text!r} is not the id of a dead letter: an id is up to 19 digits")


def _fields(found: DeadLetter) -> dict[str, Any]:
    return {
        "dead_letter_id": str(found.dead_letter_id),
        "execution_id": None if found.execution_id is None else str(found.execution_id),
        "shard_id": found.shard_id,
        "source": found.source,
        "reason": found.reason,
        "bytes": found.size,
        "created_at": found.created_at,
    }


def _audited(found: DeadLetter) -> dict[str, Any]:
    """What is kept of it when it is gone."""
    return {
        "execution_id": None if found.execution_id is None else str(found.execution_id),
        "source": found.source,
        "reason": found.reason,
        "bytes": found.size,
    }


def _shown(found: DeadLetter) -> list[Any]:
    if found.source.startswith("projection"):
        return [_readable(msgspec.json.decode(found.body))]
    messages = decode_messages(found.body)
    return [_readable(msgspec.to_builtins(one, builtin_types=(bytes,))) for one in messages]


def _readable(value: Any) -> Any:
    match value:
        case bytes():
            return f"({len(value)} bytes)"
        case dict():
            return {str(name): _readable_field(name, inner) for name, inner in value.items()}
        case list() | tuple():
            return [_readable(inner) for inner in value]
        case _:
            return value


def _readable_field(name: Any, value: Any) -> Any:
    return str(value) if name in _IDS and isinstance(value, int) else _readable(value)


_ONE = "/api/dead-letters/{dead_letter_id}"

ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/api/dead-letters",
        tag="dead letters",
        summary="List what could not be processed, from the newest to the oldest",
        handle=list_newest,
        query=http.DeadLettersQuery,
        answers={200: http.DeadLetterPage},
        problems=(422,),
    ),
    Endpoint(
        method="GET",
        path=_ONE,
        tag="dead letters",
        summary="Look into one of them",
        handle=read,
        answers={200: http.DeadLetterDocument},
        problems=(404,),
    ),
    Endpoint(
        method="POST",
        path=f"{_ONE}/retry",
        tag="dead letters",
        summary="Try it again; the answer says what that means for it",
        handle=retry,
        answers={202: http.DeadLetterRetried},
        problems=(404, 409, 422),
    ),
    Endpoint(
        method="DELETE",
        path=_ONE,
        tag="dead letters",
        summary="Discard it; that is noted in the audit",
        handle=discard,
        answers={200: http.DeadLetterDiscarded},
        problems=(404,),
    ),
)
