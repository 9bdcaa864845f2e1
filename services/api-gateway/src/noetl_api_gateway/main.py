"""The HTTP door. Reads noetl.execution, noetl.event and results; writes noetl.catalog, noetl.inbox,
noetl.idempotency and noetl.credential. Decides nothing: what a client wants goes to the broker.
"""

import asyncio
import logging
import socket
from typing import cast

import structlog
from hypercorn.asyncio import serve
from hypercorn.config import Config as HypercornConfig
from hypercorn.typing import ASGIFramework

from noetl_api_gateway.app import build_app
from noetl_api_gateway.config import GatewayConfig, url_of
from noetl_api_gateway.endpoint import Gateway
from noetl_api_gateway.ends import EndWatch
from noetl_api_gateway.questions import QueryLimits, Questions
from noetl_api_gateway.rendering import open_renderer
from noetl_core.bus.connection import open_bus
from noetl_core.process.membership import join_runtime
from noetl_core.process.secrets import load_keyring
from noetl_core.process.service import Part, Service, run_service
from noetl_core.process.stores import open_results
from noetl_core.store.postgres import open_pool
from noetl_core.wire.subjects import EXECUTIONS_ENDED

log = structlog.get_logger()


async def start(service: Service[GatewayConfig]) -> None:
    config = service.config
    # Bound first: a port that is taken should be the first thing to go wrong.
    listener = _listen(config.gateway_host, config.gateway_port)
    host, port = listener.getsockname()[:2]
    pool = await service.open(
        open_pool(config.postgres_dsn, role="noetl_api_gateway", size_max=config.gateway_pool_size)
    )
    bus = await service.open(open_bus(config.nats_url, name=config.instance))
    uri = url_of(config, port=port)
    # Two gateways of one host cannot have one port, and a restart keeps it.
    name = config.server_name or f"server-{socket.gethostname()}-{port}"
    member = await service.open(
        join_runtime(service, pool, kind="api-gateway", name=name, uri=uri, runtime_type="server")
    )
    gateway = Gateway(
        pool=pool,
        bus=bus,
        mint=member.mint,
        results=await service.open(open_results(config)),
        keyring=load_keyring(config.encryption_key) if config.encryption_key else None,
        ends=EndWatch(pool),
        renderer=await service.open(open_renderer()),
        auto_recreate_runtime=config.auto_recreate_runtime,
        questions=await _questions(service),
    )
    await bus.subscribe(EXECUTIONS_ENDED, gateway.ends.heard)
    app = cast("ASGIFramework", build_app(gateway))
    _serve(service, app, gateway.ends, listener)
    log.info("gateway.listening", host=host, port=port, url=uri)


async def _questions(service: Service[GatewayConfig]) -> Questions | None:
    config = service.config
    if not config.query_enabled:
        return None
    at_once = config.query_connections
    pool = await service.open(
        open_pool(config.postgres_dsn, role="noetl_api_gateway", size_max=at_once, size_min=0)
    )
    limits = QueryLimits(
        seconds=config.query_timeout_seconds,
        rows_max=config.query_rows_max,
        at_once=at_once,
        role=config.query_role or None,
    )
    return Questions(pool, limits)


def _serve(
    service: Service[GatewayConfig], app: ASGIFramework, ends: EndWatch, listener: socket.socket
) -> None:
    served = asyncio.Event()

    async def until_stopped() -> None:
        await service.stopping.wait()
        ends.release()

    async def run() -> None:
        try:
            await serve(app, _hypercorn(service.config, listener), shutdown_trigger=until_stopped)
        finally:
            served.set()

    async def drained() -> None:
        """What was being answered when the stop came is answered before anything closes."""
        await served.wait()

    service.background(run, name="http")
    service.on_stop(drained)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)


def _hypercorn(config: GatewayConfig, listener: socket.socket) -> HypercornConfig:
    settings = HypercornConfig()
    settings.bind = [f"fd://{listener.detach()}"]
    settings.errorlog = logging.getLogger("hypercorn.error")
    settings.graceful_timeout = config.gateway_drain_seconds
    settings.keep_alive_timeout = 75.0
    settings.keep_alive_max_requests = 1_000_000
    settings.include_server_header = False
    return settings


SERVICE = Part("api-gateway", GatewayConfig, start)


def main() -> None:
    run_service(*SERVICE)
