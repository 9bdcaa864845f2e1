"""The runtime control loop: who is registered, who lives, how much of each worker is in use.

Our own processes register themselves in Postgres and are only read here. Through this API another
system registers its own workers and servers and keeps them alive by heartbeats; the shard-manager
says which have fallen silent.
"""

from typing import TYPE_CHECKING, Any

import structlog
from starlette.requests import Request
from starlette.responses import Response

from noetl_api_gateway.answers import answer, as_is
from noetl_api_gateway.capacity import labels_shown, pools_of, worker_view
from noetl_api_gateway.endpoint import Endpoint, Gateway
from noetl_api_gateway.requests import RequestError, plain_json_body, query
from noetl_core.domain.errors import ConflictError, NotFoundError
from noetl_core.domain.ids import RuntimeId
from noetl_core.store import component
from noetl_core.store.component import Component
from noetl_core.wire import http

if TYPE_CHECKING:
    from asyncpg import Record

POOL = "worker_pool"
WORKER_KINDS = component.kinds_meant(POOL)
WORKERS_MAX = 10_000

log = structlog.get_logger()


async def register_pool(gateway: Gateway, request: Request) -> Response:
    asked = await plain_json_body(request, http.PoolRegisterRequest)
    return await _register(gateway, POOL, asked.name, asked)


async def heartbeat_pool(gateway: Gateway, request: Request) -> Response:
    """It lives. One that was forgotten comes back if the heartbeat says which pool it serves."""
    asked = await plain_json_body(request, http.PoolHeartbeatRequest)
    name = asked.name or asked.worker_id
    if not name:
        raise RequestError(422, "`name`: say who lives", field="name")
    return await _heartbeat(gateway, POOL, name, asked, is_enough=bool(asked.runtime))


async def deregister_pool(gateway: Gateway, request: Request) -> Response:
    asked = await _deregistration(request)
    return await _deregister(gateway, POOL, asked.name)


async def register_component(gateway: Gateway, request: Request) -> Response:
    asked = await plain_json_body(request, http.ComponentRegisterRequest)
    return await _register(gateway, asked.component_type, asked.name, asked)


async def heartbeat_component(gateway: Gateway, request: Request) -> Response:
    asked = await plain_json_body(request, http.ComponentHeartbeatRequest)
    is_enough = bool(asked.uri or asked.base_url or asked.runtime)
    return await _heartbeat(gateway, asked.component_type, asked.name, asked, is_enough=is_enough)


async def deregister_component(gateway: Gateway, request: Request) -> Response:
    asked = await _deregistration(request)
    return await _deregister(gateway, asked.component_type or "server_api", asked.name)


async def list_runtimes(gateway: Gateway, request: Request) -> Response:
    asked = query(request, http.RuntimesQuery)
    kinds = None if asked.kind is None else component.kinds_meant(asked.kind)
    rows = await component.registered(
        gateway.pool, kinds=kinds, status=asked.status, limit=asked.limit
    )
    return answer(200, http.RuntimePage(items=[_runtime(row) for row in rows]))


async def list_workers(gateway: Gateway, _request: Request) -> Response:
    return answer(200, http.WorkerPage(items=await _workers(gateway)))


async def list_pools(gateway: Gateway, _request: Request) -> Response:
    return answer(200, http.PoolPage(items=pools_of(await _workers(gateway))))


async def _workers(gateway: Gateway) -> list[http.WorkerView]:
    """The living first: they are what there are numbers of."""
    rows = await component.registered(gateway.pool, kinds=WORKER_KINDS, limit=WORKERS_MAX)
    return [worker_view(row) for row in rows]


async def _register(
    gateway: Gateway, kind: str, name: str, asked: http.ComponentReport, *, recreated: bool = False
) -> Response:
    described = Component(
        kind=kind,
        name=name,
        uri=asked.uri or asked.base_url,
        status=asked.status or "ready",
        labels=asked.labels,
        capabilities=asked.capabilities,
        capacity=asked.capacity,
        runtime=_reported(asked),
    )
    found = await component.register(gateway.pool, RuntimeId(gateway.mint()), described)
    if found is None:
        raise ConflictError(f"a {kind} of this NoETL has the name `{name}`: choose another one")
    log.info("runtime.registered", kind=kind, name=name, recreated=recreated)
    return _ok(kind, name, found, recreated=recreated)


async def _heartbeat(
    gateway: Gateway, kind: str, name: str, asked: http.ComponentReport, *, is_enough: bool
) -> Response:
    found = await component.heartbeat(
        gateway.pool,
        kind=kind,
        name=name,
        status=asked.status,
        capacity=asked.capacity,
        report=_reported(asked),
    )
    if found is not None:
        return _ok(kind, name, found)
    if gateway.auto_recreate_runtime and is_enough:
        return await _register(gateway, kind, name, asked, recreated=True)
    where = "/api/worker/pool/register" if kind == POOL else "/api/runtime/register"
    raise NotFoundError(f"no {kind} `{name}` is registered: register it with POST {where}")


async def _deregister(gateway: Gateway, kind: str, name: str) -> Response:
    found = await component.deregister(gateway.pool, kind=kind, name=name)
    if found is None:
        raise NotFoundError(f"no {kind} `{name}` is registered through this API")
    log.info("runtime.deregistered", kind=kind, name=name)
    return _ok(kind, name, found)


async def _deregistration(request: Request) -> http.DeregisterRequest:
    """Not every client can send a body with DELETE."""
    if request.query_params:
        return query(request, http.DeregisterRequest)
    return await plain_json_body(request, http.DeregisterRequest)


def _ok(kind: str, name: str, runtime_id: RuntimeId, *, recreated: bool = False) -> Response:
    body = http.Registration(name=name, kind=kind, runtime_id=str(runtime_id), recreated=recreated)
    return answer(200, body)


def _reported(asked: http.ComponentReport) -> dict[str, Any]:
    """What was said and no more: a heartbeat must not wipe out what it does not mention."""
    said = {
        "type": asked.runtime or None,
        "pid": asked.pid,
        "hostname": asked.hostname,
        "worker_id": asked.worker_id,
        "running": asked.active_tasks if asked.running is None else asked.running,
        "free": asked.available_slots if asked.free is None else asked.free,
        "tools": asked.tool_pools if asked.tools is None else asked.tools,
        "heartbeat_interval_seconds": asked.heartbeat_interval_seconds,
    }
    return {name: value for name, value in said.items() if value is not None}


def _runtime(row: "Record") -> http.RuntimeView:
    return http.RuntimeView(
        runtime_id=str(row["runtime_id"]),
        kind=row["kind"],
        name=row["name"],
        status=row["status"],
        uri=row["uri"],
        labels=labels_shown(row["labels"]),
        capabilities=as_is(row["capabilities"]),
        capacity=row["capacity"],
        runtime=as_is(row["runtime"]),
        heartbeat=row["heartbeat"],
        heartbeat_age_seconds=row["heartbeat_age_seconds"],
        registered_at=row["created_at"],
    )


_WRONG_BODY = (400, 413, 415, 422)

ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/api/worker/pool/register",
        tag="runtime",
        summary="Register a worker pool, or replace what was said of it",
        handle=register_pool,
        body=http.PoolRegisterRequest,
        answers={200: http.Registration},
        problems=(409, *_WRONG_BODY),
    ),
    Endpoint(
        method="POST",
        path="/api/worker/pool/heartbeat",
        tag="runtime",
        summary="Say that a worker pool lives",
        handle=heartbeat_pool,
        body=http.PoolHeartbeatRequest,
        answers={200: http.Registration},
        problems=(404, *_WRONG_BODY),
    ),
    Endpoint(
        method="DELETE",
        path="/api/worker/pool/deregister",
        tag="runtime",
        summary="Say that a worker pool has ended",
        handle=deregister_pool,
        body=http.DeregisterRequest,
        body_required=False,
        answers={200: http.Registration},
        problems=(404, *_WRONG_BODY),
    ),
    Endpoint(
        method="POST",
        path="/api/runtime/register",
        tag="runtime",
        summary="Register a server or a broker of another system",
        handle=register_component,
        body=http.ComponentRegisterRequest,
        answers={200: http.Registration},
        problems=(409, *_WRONG_BODY),
    ),
    Endpoint(
        method="POST",
        path="/api/runtime/heartbeat",
        tag="runtime",
        summary="Say that a registered process lives",
        handle=heartbeat_component,
        body=http.ComponentHeartbeatRequest,
        answers={200: http.Registration},
        problems=(404, *_WRONG_BODY),
    ),
    Endpoint(
        method="DELETE",
        path="/api/runtime/deregister",
        tag="runtime",
        summary="Say that a registered process has ended",
        handle=deregister_component,
        body=http.DeregisterRequest,
        body_required=False,
        answers={200: http.Registration},
        problems=(404, *_WRONG_BODY),
    ),
    Endpoint(
        method="GET",
        path="/api/runtimes",
        tag="runtime",
        summary="List every registered process with the age of its heartbeat",
        handle=list_runtimes,
        query=http.RuntimesQuery,
        answers={200: http.RuntimePage},
        problems=(422,),
    ),
    Endpoint(
        method="GET",
        path="/api/worker/pools",
        tag="runtime",
        summary="List worker pools with the capacity of their workers together",
        handle=list_pools,
        answers={200: http.PoolPage},
    ),
    Endpoint(
        method="GET",
        path="/api/workers",
        tag="runtime",
        summary="List workers with their live capacity",
        handle=list_workers,
        answers={200: http.WorkerPage},
    ),
)
