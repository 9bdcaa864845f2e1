"""POST /api/context/render: what a template gives, by the same code that runs it in a worker."""

from starlette.requests import Request
from starlette.responses import Response

from noetl_api_gateway.answers import answer
from noetl_api_gateway.endpoint import Endpoint, Gateway
from noetl_api_gateway.requests import json_body
from noetl_core.wire import http


async def render(gateway: Gateway, request: Request) -> Response:
    asked = await json_body(request, http.RenderRequest)
    value = await gateway.renderer.render(asked)
    return answer(200, http.Rendered(value=value))


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/api/context/render",
        tag="templates",
        summary="Render a template with the given names",
        handle=render,
        body=http.RenderRequest,
        answers={200: http.Rendered},
        problems=(400, 413, 415, 422),
    ),
)
