"""Questions in SQL: one SELECT at a time, read-only, without secrets, for a few seconds."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from noetl_api_gateway.answers import answer
from noetl_api_gateway.endpoint import Endpoint, Gateway
from noetl_api_gateway.requests import RequestError, json_body
from noetl_core.store import query
from noetl_core.wire import http
from noetl_core.wire.http import RESULTS_BYTES_MAX


async def execute(gateway: Gateway, request: Request) -> Response:
    asked = await json_body(request, http.SqlRequest)
    limits = gateway.query_limits
    if limits is None:
        detail = (
            "questions in SQL are not allowed here: start the gateway with NOETL_QUERY_ENABLED=true"
        )
        raise RequestError(403, detail)
    async with gateway.pool.acquire() as conn:
        found = await query.ask(
            conn,
            asked.query,
            row_limit=limits.rows_max + 1,
            bytes_max=RESULTS_BYTES_MAX,
            seconds=limits.seconds,
        )
    rows = [msgspec.Raw(row.encode()) for row in found.rows[: limits.rows_max]]
    is_truncated = len(found.rows) > limits.rows_max
    body = http.SqlAnswer(columns=found.columns, result=rows, truncated=is_truncated)
    return answer(200, body)


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/api/postgres/execute",
        tag="runtime",
        summary="Ask the database one SELECT; nothing can be changed and no secret be seen",
        handle=execute,
        body=http.SqlRequest,
        answers={200: http.SqlAnswer},
        problems=(400, 403, 413, 415, 422),
    ),
)
