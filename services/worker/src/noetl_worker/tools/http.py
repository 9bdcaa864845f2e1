"""`http`: one request. Whatever is not 2xx is an error that says whether it is worth a retry."""

import base64
import datetime as dt
import email.utils
from collections.abc import Mapping
from typing import Any

import httpx
import msgspec

from noetl_core.domain.errors import ToolError
from noetl_core.domain.result_view import plain
from noetl_worker.tools.tool import Credential, ToolCall, ToolFailedError, ToolResult, wrong_field

TIMEOUT_SECONDS_DEFAULT = 30.0
BODY_BYTES_MAX = 64 * 1024 * 1024
CONNECTIONS_MAX = 100

_LIMITS = httpx.Limits(max_connections=CONNECTIONS_MAX, keepalive_expiry=30)
_ERROR_HEADERS = ("retry-after", "content-type", "location", "www-authenticate", "x-request-id")
_RETRYABLE_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
_NAMED_STATUSES = {
    401: "auth",
    403: "auth",
    404: "not_found",
    408: "timeout",
    410: "not_found",
    429: "rate_limit",
}
_JSON_FIELDS = ("json", "payload")
_RAW_FIELDS = ("body", "data")


class HttpTool:
    kind = "http"

    def __init__(self) -> None:
        self._clients: dict[bool, httpx.AsyncClient] = {}

    async def run(self, call: ToolCall) -> ToolResult:
        config = call.config
        client = self._client(verify=bool(config.get("verify_ssl", True)))
        request = await _request(client, call)
        try:
            response = await client.send(
                request, stream=True, follow_redirects=bool(config.get("follow_redirects", True))
            )
            try:
                body = await _read(response)
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            return ToolResult(error=_transport_error(error))
        return _result(response, body)

    def _client(self, *, verify: bool) -> httpx.AsyncClient:
        if verify not in self._clients:
            self._clients[verify] = httpx.AsyncClient(
                verify=verify, limits=_LIMITS, timeout=TIMEOUT_SECONDS_DEFAULT
            )
        return self._clients[verify]

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()


async def _request(client: httpx.AsyncClient, call: ToolCall) -> httpx.Request:
    config = call.config
    url = config.get("url", config.get("endpoint"))
    if not isinstance(url, str) or not url:
        raise wrong_field("url", "must be text")
    headers = {str(name): str(value) for name, value in (config.get("headers") or {}).items()}
    content = _content(config, headers)
    params = _params(config.get("params"))
    await _authorise(call, headers, params)
    try:
        return client.build_request(
            str(config.get("method") or "GET").upper(),
            url,
            headers=headers,
            params=httpx.QueryParams(params) if params else None,
            timeout=call.timeout_s or TIMEOUT_SECONDS_DEFAULT,
            **content,
        )
    except (httpx.InvalidURL, TypeError, ValueError) as error:
        raise wrong_field("url", f"is no usable address: {error}") from None


def _content(config: Mapping[str, Any], headers: dict[str, str]) -> dict[str, Any]:
    """The body, from whichever field gives one. Structured data is JSON unless it is a form."""
    for field in _JSON_FIELDS:
        if config.get(field) is not None:
            return _json(config[field], headers)
    if config.get("form") is not None:
        return {"data": _params(config["form"])}
    for field in _RAW_FIELDS:
        value = config.get(field)
        if isinstance(value, str):
            return {"content": value.encode()}
        if value is not None:
            is_form = "form" in _header(headers, "content-type")
            return {"data": _params(value)} if is_form else _json(value, headers)
    return {}


def _json(value: Any, headers: dict[str, str]) -> dict[str, Any]:
    if not _header(headers, "content-type"):
        headers["Content-Type"] = "application/json"
    return {"content": msgspec.json.encode(plain(value))}


def _params(params: Any) -> dict[str, Any]:
    """Query or form fields: null is left out, a list is repeated."""
    if params is None:
        return {}
    if not isinstance(params, Mapping):
        raise wrong_field("params", f"must be a mapping, not {type(params).__name__}")
    return {
        str(name): [_word(item) for item in value] if isinstance(value, list) else _word(value)
        for name, value in params.items()
        if value is not None
    }


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _header(headers: Mapping[str, str], name: str) -> str:
    found = (value for key, value in headers.items() if key.lower() == name)
    return next(found, "").lower()


async def _authorise(call: ToolCall, headers: dict[str, str], params: dict[str, Any]) -> None:
    auth = call.config.get("auth")
    if not auth:
        return
    if isinstance(auth, str):
        credential = await call.credential(auth)
    elif isinstance(auth, Mapping):
        credential = Credential("auth", str(auth.get("type", "")), auth)
    else:
        raise wrong_field("auth", "must name a credential")
    _apply(credential, headers, params)


def _apply(credential: Credential, headers: dict[str, str], params: dict[str, Any]) -> None:
    """Bearer `token`; basic `username` and `password`; a `header` or a `param` with its `value`."""
    data = credential.data
    if data.get("token"):
        headers["Authorization"] = f"Bearer {data['token']}"
    elif data.get("username") is not None:
        login = f"{data['username']}:{data.get('password', '')}".encode()
        headers["Authorization"] = "Basic " + base64.b64encode(login).decode()
    elif isinstance(data.get("headers"), Mapping):
        headers.update({str(name): str(value) for name, value in data["headers"].items()})
    elif data.get("value") is not None and (data.get("header") or data.get("param")):
        place = headers if data.get("header") else params
        place[str(data.get("header") or data.get("param"))] = str(data["value"])
    else:
        raise wrong_field("auth", f"{credential.name!r} holds nothing that HTTP can send")


async def _read(response: httpx.Response) -> bytes:
    pieces, size = [], 0
    async for piece in response.aiter_bytes():
        size += len(piece)
        if size > BODY_BYTES_MAX:
            message = f"the answer is larger than {BODY_BYTES_MAX} bytes"
            raise ToolFailedError(
                ToolError(kind="client_error", code="RESPONSE_TOO_LARGE", message=message)
            )
        pieces.append(piece)
    return b"".join(pieces)


def _result(response: httpx.Response, body: bytes) -> ToolResult:
    document: dict[str, Any] = {
        "status_code": response.status_code,
        "headers": dict(response.headers),
        "url": str(response.url.copy_with(query=None, username=None, password=None)),
        "elapsed": round(response.elapsed.total_seconds(), 6),
    }
    problem = _parse(response, body, document)
    if response.is_success:
        return ToolResult(document, error=problem)
    return ToolResult(document, error=_status_error(response))


def _parse(response: httpx.Response, body: bytes, document: dict[str, Any]) -> ToolError | None:
    """Puts the body under `data`: parsed, as text, or in base64 where it is neither."""
    media_type = response.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type.endswith(("/json", "+json")):
        try:
            document["data"] = msgspec.json.decode(body) if body.strip() else None
        except msgspec.DecodeError as error:
            document["data"] = body.decode("utf-8", "replace")
            return ToolError(kind="parse", message=f"the answer says it is JSON, but {error}")
        return None
    try:
        document["data"] = body.decode(response.charset_encoding or "utf-8")
    except (UnicodeDecodeError, LookupError):
        document["data"] = base64.b64encode(body).decode()
        document["encoding"] = "base64"
    return None


def _status_error(response: httpx.Response) -> ToolError:
    status = response.status_code
    headers = {name: response.headers[name] for name in _ERROR_HEADERS if name in response.headers}
    details: dict[str, Any] = {"http": {"status": status, "headers": headers}}
    delay = retry_after_seconds(response.headers.get("retry-after"))
    if delay is not None:
        details["retry_after"] = delay
    return ToolError(
        kind=_kind_of(status),
        code=f"HTTP_{status}",
        message=f"{response.request.method} {_place(response.url)} answered {status}",
        retryable=status in _RETRYABLE_STATUSES,
        details=details,
    )


def _kind_of(status: int) -> str:
    if status in _NAMED_STATUSES:
        return _NAMED_STATUSES[status]
    return "server_error" if httpx.codes.is_server_error(status) else "client_error"


def _transport_error(error: httpx.HTTPError) -> ToolError:
    reason = str(error) or type(error).__name__
    match error:
        case httpx.TimeoutException():
            return ToolError(kind="timeout", message=f"no answer in time: {reason}", retryable=True)
        case httpx.UnsupportedProtocol() | httpx.TooManyRedirects() | httpx.DecodingError():
            return ToolError(kind="client_error", message=reason)
        case _:
            return ToolError(kind="connection", message=f"no connection: {reason}", retryable=True)


def retry_after_seconds(value: str | None) -> float | None:
    """`Retry-After` in seconds or as a date; None when there is none that can be read."""
    if not value:
        return None
    if value.strip().isdigit():
        return float(value)
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=dt.UTC)
    return max(0.0, (moment - dt.datetime.now(dt.UTC)).total_seconds())


def _place(url: httpx.URL) -> str:
    """Without what may be secret in it: login and query."""
    return f"{url.host}{url.path}"
