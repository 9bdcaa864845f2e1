"""What goes out: answers as JSON, and every error as a problem (RFC 9457). No other file knows a
status code of an error.

RequestError            its own 4xx      the request is malformed, too large, of a wrong type
NotFoundError           404
ConflictError           409
PlaybookInvalidError    422              with every problem, its line and column
TemplateError           422              with the field of the template
another RejectedError   422
NotShownError           504              the status does not show yet what the client knows of
StoreAwayError          503              with Retry-After: S3, or the volume of results or archives
another RetryableError, and whatever a Postgres that is away raises      503, with Retry-After
HTTPException           as it says       an unknown path, a wrong method
anything else           500              a bug: logged with its traceback, told to nobody
"""

from http import HTTPStatus
from typing import Any

import msgspec
import structlog
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from noetl_api_gateway.requests import RequestError
from noetl_api_gateway.shown import NotShownError
from noetl_core.blob.away import StoreAwayError
from noetl_core.domain.errors import (
    ConflictError,
    NotFoundError,
    PlaybookInvalidError,
    RejectedError,
    TemplateError,
)
from noetl_core.process.complaint import Complaint
from noetl_core.process.resilience import is_transient
from noetl_core.store.execution import StateUnreadableError
from noetl_core.wire.http import ProblemDetails

PROBLEM_MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_SECONDS = 1

log = structlog.get_logger()

_unavailability = Complaint()
_encode = msgspec.json.Encoder().encode


def answer(status: int, body: object) -> Response:
    return Response(_encode(body), status, media_type="application/json")


def as_is(json: str | None) -> Any:
    """JSON from the database goes through as it is: nobody here has to look into it."""
    return None if json is None else msgspec.Raw(json.encode())


def problem_of(error: Exception) -> Response:  # noqa: C901, PLR0911 - one case an error
    """The one place where an error becomes an answer."""
    match error:
        case RequestError():
            return _problem(error.status, str(error), field=error.field, headers=error.headers)
        case NotFoundError():
            return _problem(404, str(error))
        case ConflictError():
            return _problem(409, str(error))
        case PlaybookInvalidError():
            return _problem(422, _count(error), kind="playbook-invalid", problems=error.problems)
        case TemplateError():
            return _problem(422, error.reason, kind="template-error", field=error.field)
        case RejectedError():
            return _problem(422, str(error))
        case HTTPException():
            return _problem(error.status_code, error.detail, headers=dict(error.headers or {}))
        case ClientDisconnect():
            return _problem(400, "the client went away before its request was complete")
        case NotShownError():
            headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
            return _problem(504, str(error), kind="not-shown-yet", headers=headers)
        case StateUnreadableError():
            return _unavailable(error, str(error))
        case StoreAwayError():
            return _unavailable(error, f"what is stored cannot be read at the moment: {error}")
        case _ if is_transient(error):
            return _unavailable(error, "the database cannot be reached at the moment; try again")
        case _:
            log.error("request.failed", exc_info=error)
            return _problem(500, "an unexpected error; the log of the gateway has its traceback")


async def http_problem(_request: Request, error: Exception) -> Response:
    """What the router raises: no such path, no such method."""
    return problem_of(error)


def _unavailable(error: Exception, detail: str) -> Response:
    if _unavailability.failed():
        count = _unavailability.failures
        log.warning("request.unavailable", requests=count, error=f"{type(error).__name__}: {error}")
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
    return _problem(503, detail, headers=headers)


def _problem(
    status: int,
    detail: str,
    *,
    kind: str | None = None,
    headers: dict[str, str] | None = None,
    **extra: Any,
) -> Response:
    title = HTTPStatus(status).phrase
    name = kind or title.lower().replace(" ", "-")
    details = ProblemDetails(
        type=f"urn:noetl:problem:{name}", title=title, status=status, detail=detail, **extra
    )
    return Response(_encode(details), status, headers, PROBLEM_MEDIA_TYPE)


def _count(error: PlaybookInvalidError) -> str:
    count = len(error.problems)
    return f"the playbook has {count} problem{'' if count == 1 else 's'}"
