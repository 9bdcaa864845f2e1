"""What a client is promised: its message is in noetl.inbox before the answer goes out.

With an idempotency key the promise is made once, however often the request comes.
"""

import hashlib
from typing import Any

import msgspec
from starlette.requests import Request

from noetl_api_gateway.endpoint import Gateway
from noetl_api_gateway.requests import RequestError
from noetl_core.domain.ids import ExecutionId, ShardId
from noetl_core.store import idempotency, inbox
from noetl_core.store.idempotency import Keyed
from noetl_core.wire import http
from noetl_core.wire.http import IDEMPOTENCY_HEADER, PAYLOAD_BYTES_MAX
from noetl_core.wire.messages import Message, Stored, encode_messages
from noetl_core.wire.subjects import inbox_wake


async def promise(gateway: Gateway, execution_id: ExecutionId, messages: list[Message]) -> None:
    body = _encoded(messages)
    await wake(gateway, await inbox.promise(gateway.pool, execution_id, body))


async def promise_once(
    gateway: Gateway, key: str, wanted: Keyed, message: Message
) -> ExecutionId | None:
    """Commit the request together with its key; gives the execution that has the key already."""
    shard = await idempotency.promise_once(gateway.pool, key, wanted, _encoded([message]))
    if shard is not None:
        await wake(gateway, shard)
        return None
    earlier = await idempotency.find(gateway.pool, key)
    assert earlier is not None, "a key is never given back"
    if earlier.fingerprint != wanted.fingerprint:
        raise RequestError(422, "this key belongs to another request", field="idempotency_key")
    return earlier.execution_id


def idempotency_key(request: Request, in_body: str | None = None) -> str | None:
    header = request.headers.get(IDEMPOTENCY_HEADER)
    if header is None:
        return in_body
    if in_body not in (None, header):
        raise RequestError(422, "the header and the body give different keys")
    try:
        return msgspec.convert(header, http.IdempotencyKey)
    except msgspec.ValidationError as error:
        raise RequestError(422, f"{IDEMPOTENCY_HEADER}: {error}") from None


def fingerprint(asked: object) -> bytes:
    """Of what was asked, not of what it led to: a version may have been added since."""
    return hashlib.sha256(msgspec.json.encode(asked, order="sorted")).digest()


def stored(value: Any, *, field: str) -> Stored:
    """A value as the broker will store it: inline, whatever its size up to the limit."""
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        raise RequestError(422, "a number has more than 64 bits", field=field) from None
    inline = msgspec.json.encode(value)
    if len(inline) > PAYLOAD_BYTES_MAX:
        raise RequestError(413, f"the {field} has more than {PAYLOAD_BYTES_MAX} bytes")
    sha256 = hashlib.sha256(inline).digest()
    return Stored(tier="db", size=len(inline), sha256=sha256, inline=inline)


def _encoded(messages: list[Message]) -> bytes:
    try:
        return encode_messages(messages)
    except OverflowError:
        raise RequestError(422, "a number has more than 64 bits") from None


async def wake(gateway: Gateway, shard: ShardId) -> None:
    # After the commit: a lost wake-up costs the broker's next look, 200 ms.
    await gateway.bus.wake(inbox_wake(shard))
