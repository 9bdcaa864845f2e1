"""What came in: bodies, queries and path parameters, checked before anything else looks at them."""

import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from starlette.requests import Request

from noetl_core.domain.errors import NotFoundError, RejectedError
from noetl_core.domain.ids import ID_MAX, ExecutionId
from noetl_core.wire.http import BODY_BYTES_MAX

T = TypeVar("T")

JSON = "application/json"
_CALLED_BY_CURL = frozenset({"", "application/x-www-form-urlencoded"})
YAML_MEDIA_TYPES = frozenset({"application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml"})

_ID = re.compile(r"[0-9]{1,19}")
_PLACE = re.compile(r"(?P<reason>.*?)(?: - at `\$\.?(?P<field>.*)`)?", re.DOTALL)
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<field>.*)`", re.DOTALL)
# An even number of backslashes before it would be that many characters and the text "u0000".
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


class RequestError(RejectedError):
    """The request itself is wrong, whatever the state of the system. `status` says how."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        field: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.field = field
        self.headers = dict(headers or {})


async def json_body(request: Request, kind: type[T], *, bytes_max: int = BODY_BYTES_MAX) -> T:
    """The body as `kind`. It must say that it is JSON: a form on a stranger's page cannot."""
    return _decode_body(request, await read_body(request, bytes_max=bytes_max), kind)


async def plain_json_body(request: Request, kind: type[T], *, bytes_max: int = BODY_BYTES_MAX) -> T:
    """The same for what programs send from scripts: `curl -d` calls its JSON a form, and that is
    accepted from whoever is no browser. A browser always says where its page comes from.
    """
    body = await read_body(request, bytes_max=bytes_max)
    if media_type(request) in _CALLED_BY_CURL and not _is_from_a_page(request):
        return decode_json(body, kind)
    return _decode_body(request, body, kind)


def _is_from_a_page(request: Request) -> bool:
    return "origin" in request.headers or "sec-fetch-site" in request.headers


async def optional_json_body(request: Request, kind: type[T]) -> T:
    """The same where every field has a default: no body means the defaults."""
    body = await read_body(request, bytes_max=BODY_BYTES_MAX)
    return _decode_body(request, body, kind) if body else kind()


def _decode_body(request: Request, body: bytes, kind: type[T]) -> T:
    if media_type(request) != JSON:
        raise RequestError(415, f"the body must be JSON, with `Content-Type: {JSON}`")
    return decode_json(body, kind)


def decode_json(body: bytes, kind: type[T]) -> T:
    if _NUL.search(body):
        raise RequestError(422, "a text may not contain the character U+0000")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_value(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(400, f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise RequestError(400, "the body is nested too deeply") from None


async def read_body(request: Request, *, bytes_max: int) -> bytes:
    """The whole body, refused as soon as it is known to be too large."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:19]) > bytes_max:
        raise _too_large(bytes_max)
    chunks: list[bytes] = []
    length = 0
    async for chunk in request.stream():
        length += len(chunk)
        if length > bytes_max:
            raise _too_large(bytes_max)
        chunks.append(chunk)
    return b"".join(chunks)


def media_type(request: Request) -> str:
    return request.headers.get("content-type", "").split(";")[0].strip().lower()


def query(request: Request, kind: type[T]) -> T:
    """The query as `kind`; a parameter that is unknown, wrong or given twice is refused."""
    values: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name in values:
            raise RequestError(422, f"`{name}` is given more than once", field=name)
        if "\0" in value:
            raise RequestError(422, "a text may not contain the character U+0000", field=name)
        values[name] = value
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _wrong_value(error) from None
    except ValueError as error:  # seconds that lead just past the end of the calendar
        raise RequestError(422, str(error)) from None


def execution_id_of(request: Request) -> ExecutionId:
    text = request.path_params["execution_id"]
    if _ID.fullmatch(text) and int(text) <= ID_MAX:
        return ExecutionId(int(text))
    raise NotFoundError(f"{text!r} is not the id of an execution: an id is up to 19 digits")


def text_of(request: Request, name: str) -> str:
    """A path parameter that goes into a look-up."""
    text: str = request.path_params[name]
    if "\0" in text:
        raise NotFoundError(f"no {name} contains the character U+0000")
    return text


def _wrong_value(error: msgspec.ValidationError) -> RequestError:
    message = str(error)
    unknown = _UNKNOWN_FIELD.match(message)
    if unknown:
        name = unknown["field"]
        return RequestError(422, f"there is no field `{name}` here", field=name)
    found = _PLACE.fullmatch(message)
    field = found["field"] if found else None
    reason = found["reason"] if found else message
    where = f"`{field}`: " if field else ""
    return RequestError(422, f"{where}{reason[:1].lower()}{reason[1:]}", field=field)


def _too_large(bytes_max: int) -> RequestError:
    return RequestError(413, f"the body is larger than {bytes_max} bytes")
