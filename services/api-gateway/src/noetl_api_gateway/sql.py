"""Questions in SQL: one SELECT at a time, read-only, without secrets, for a few seconds."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from noetl_api_gateway.answers import answer
from noetl_api_gateway.auth import check_role
from noetl_api_gateway.endpoint import Endpoint, Gateway
from noetl_api_gateway.requests import RequestError, plain_json_body
from noetl_core.wire import http


async def execute(gateway: Gateway, request: Request) -> Response:
    questions = gateway.questions
    if questions is None:
        detail = (
            "questions in SQL are not allowed here: start the gateway with NOETL_QUERY_ENABLED=true"
        )
        raise RequestError(403, detail)
    limits = questions.limits
    await check_role(gateway, request, limits.least, is_required=limits.role is not None)
    asked = await plain_json_body(request, http.SqlRequest)
    found = await questions.ask(asked.query)
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
        headers={"Authorization": "Bearer and an API key whose role may ask."},
        answers={200: http.SqlAnswer},
        problems=(400, 401, 403, 413, 415, 422, 429),
    ),
)
