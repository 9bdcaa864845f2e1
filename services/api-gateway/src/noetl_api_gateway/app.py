"""The application: every endpoint of the table behind the same door."""

import asyncio
import time

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from noetl_api_gateway import (
    catalog,
    control,
    credentials,
    dead_letters,
    executions,
    explain,
    measurements,
    metrics,
    render,
    reports,
    results,
    runtime,
    shards,
    sql,
    status,
    traces,
)
from noetl_api_gateway.answers import http_problem, problem_of
from noetl_api_gateway.endpoint import Endpoint, Gateway
from noetl_api_gateway.openapi import describe
from noetl_core.wire.http import WAIT_SECONDS_MAX

ANSWER_SECONDS_MAX = WAIT_SECONDS_MAX + 15.0

ENDPOINTS: tuple[Endpoint, ...] = (
    *catalog.ENDPOINTS,
    *executions.ENDPOINTS,
    *explain.ENDPOINTS,
    *control.ENDPOINTS,
    *results.ENDPOINTS,
    *traces.ENDPOINTS,
    *reports.ENDPOINTS,
    *credentials.ENDPOINTS,
    *render.ENDPOINTS,
    *dead_letters.ENDPOINTS,
    *runtime.ENDPOINTS,
    *measurements.ENDPOINTS,
    *sql.ENDPOINTS,
    *shards.ENDPOINTS,
    *status.ENDPOINTS,
)


def build_app(gateway: Gateway) -> Starlette:
    routes = [_route(gateway, endpoint) for endpoint in (*ENDPOINTS, *describe(ENDPOINTS))]
    app = Starlette(routes=routes, exception_handlers={HTTPException: http_problem})
    app.router.redirect_slashes = False
    return app


def _route(gateway: Gateway, endpoint: Endpoint) -> Route:
    labels = {"method": endpoint.method, "route": endpoint.path}

    async def serve(request: Request) -> Response:
        begun = time.perf_counter()
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                response = await endpoint.handle(gateway, request)
        except Exception as error:  # noqa: BLE001 - whatever happened, the client gets an answer
            response = problem_of(error)
        metrics.REQUEST_MS.record((time.perf_counter() - begun) * 1000, labels)
        metrics.REQUESTS.add(1, {**labels, "status": str(response.status_code)})
        return response

    return Route(endpoint.path, serve, methods=[endpoint.method])
