"""Whether the gateway lives, whether it can serve, and what it has measured."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from noetl_api_gateway.answers import answer
from noetl_api_gateway.endpoint import Endpoint, Gateway
from noetl_core.process.telemetry import exposition
from noetl_core.store import setting
from noetl_core.wire import http

READY_SECONDS_MAX = 2.0

METRICS_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def health(_gateway: Gateway, _request: Request) -> Response:
    return answer(200, http.Health())


async def ready(gateway: Gateway, _request: Request) -> Response:
    """Ready while Postgres answers; NATS only makes things faster."""
    async with asyncio.timeout(READY_SECONDS_MAX):
        await setting.shard_count(gateway.pool)
    return answer(200, http.Health())


async def metrics(_gateway: Gateway, _request: Request) -> Response:
    return Response(exposition(), media_type=METRICS_MEDIA_TYPE)


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/health",
        tag="service",
        summary="The process lives",
        handle=health,
        answers={200: http.Health},
    ),
    Endpoint(
        method="GET",
        path="/ready",
        tag="service",
        summary="The gateway can serve: Postgres answers",
        handle=ready,
        answers={200: http.Health},
        problems=(503,),
    ),
    Endpoint(
        method="GET",
        path="/metrics",
        tag="service",
        summary="Metrics in the text format of Prometheus",
        handle=metrics,
        answers={200: None},
        media_type="text/plain",
    ),
)
