"""A gateway on a real Postgres, under its own role, and a real NATS; no socket in front of it."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from noetl_api_gateway.app import build_app
from noetl_api_gateway.endpoint import Gateway
from noetl_api_gateway.ends import EndWatch
from noetl_api_gateway.rendering import Renderer, open_renderer
from noetl_core.blob import ResultStore
from noetl_core.blob.file_place import FilePlace
from noetl_core.bus.connection import Bus
from noetl_core.domain.snowflake import Snowflake
from noetl_core.process.clock import unix_ms
from noetl_core.process.secrets import Keyring
from noetl_core.store.postgres import open_pool

Client = httpx.AsyncClient
ENCRYPTION_KEY = bytes(range(32))


@pytest.fixture(scope="session")
def mint() -> Callable[[], int]:
    return Snowflake(node=1, now_ms=unix_ms).mint


@pytest.fixture
async def renderer() -> AsyncIterator[Renderer]:
    async with open_renderer() as opened:
        yield opened


@pytest.fixture
async def gateway(
    database: str, bus: Bus, mint: Callable[[], int], renderer: Renderer, tmp_path: Path
) -> AsyncIterator[Gateway]:
    async with open_pool(database, role="noetl_api_gateway", size_max=10) as pool:
        yield Gateway(
            pool=pool,
            bus=bus,
            mint=mint,
            results=ResultStore(store_dir=str(tmp_path), archives=FilePlace(tmp_path / "archive")),
            keyring=Keyring([ENCRYPTION_KEY]),
            ends=EndWatch(pool),
            renderer=renderer,
        )


@pytest.fixture
def app(gateway: Gateway) -> Starlette:
    return build_app(gateway)


@pytest.fixture
async def client(app: Starlette) -> AsyncIterator[Client]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as opened:
        yield opened
