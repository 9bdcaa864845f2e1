"""GET /health (the loop turns), /ready (it has started and is not stopping), /metrics.

Written on asyncio alone: three answers for machines need no framework.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus

from noetl_core.process.telemetry import exposition

_REQUEST_BYTES_MAX = 16 * 1024
_REQUEST_SECONDS_MAX = 5.0
_JSON = "application/json"
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


@asynccontextmanager
async def serve_health(host: str, port: int, is_ready: Callable[[], bool]) -> AsyncIterator[int]:
    """Serve until the end of the block; yields the port, which differs from `port` if that is 0."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await asyncio.wait_for(_read_request(reader), _REQUEST_SECONDS_MAX)
            writer.write(_respond(request, is_ready))
            await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the caller went away or never spoke HTTP; there is nobody to answer
        finally:
            writer.close()

    server = await asyncio.start_server(answer, host, port, limit=_REQUEST_BYTES_MAX)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _read_request(reader: asyncio.StreamReader) -> str:
    head = await reader.readuntil(b"\r\n\r\n")
    return head.split(b"\r\n", 1)[0].decode("latin-1")


def _respond(request: str, is_ready: Callable[[], bool]) -> bytes:
    method, _, rest = request.partition(" ")
    path = rest.split(" ")[0].split("?")[0]
    if method not in ("GET", "HEAD"):
        return _response(HTTPStatus.METHOD_NOT_ALLOWED, b"{}", _JSON)
    match path:
        case "/health":
            return _response(HTTPStatus.OK, b'{"status":"ok"}', _JSON)
        case "/ready" if is_ready():
            return _response(HTTPStatus.OK, b'{"status":"ready"}', _JSON)
        case "/ready":
            return _response(HTTPStatus.SERVICE_UNAVAILABLE, b'{"status":"not ready"}', _JSON)
        case "/metrics":
            return _response(HTTPStatus.OK, exposition(), _TEXT)
        case _:
            return _response(HTTPStatus.NOT_FOUND, b"{}", _JSON)


def _response(status: HTTPStatus, body: bytes, media_type: str) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {media_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + body
