"""The whole service over a real socket: it listens, answers, drains and goes."""

import asyncio

import httpx
import msgspec

from noetl_api_gateway.config import GatewayConfig
from noetl_api_gateway.main import start
from noetl_core.domain.ids import ShardId
from noetl_core.process.service import Service, serving
from noetl_core.store import inbox
from noetl_core.store.postgres import Pool
from services.api_gateway.given import an_execution, registered


async def address(pool: Pool) -> str:
    uri: str = await pool.fetchval("SELECT uri FROM noetl.runtime WHERE kind = 'api-gateway'")
    return uri


def a_service(database: str, nats_url: str) -> Service[GatewayConfig]:
    config = GatewayConfig(postgres_dsn=database, nats_url=nats_url, gateway_port=0)
    return Service("api-gateway", config)


async def test_a_playbook_is_registered_and_started_over_a_socket(
    database: str, pool: Pool, nats_url: str
) -> None:
    async with (
        serving(a_service(database, nats_url), start),
        httpx.AsyncClient(base_url=await address(pool), trust_env=False, timeout=60) as client,
    ):
        await registered(client)
        answer = await client.post("/api/execute", json={"path": "examples/hello"})

    assert answer.status_code == 202
    shards = [ShardId(number) for number in range(16)]
    assert len(await inbox.waiting(pool, shards, limit=10)) == 1


async def test_without_nats_everything_still_works(database: str, pool: Pool) -> None:
    async with (
        serving(a_service(database, "nats://127.0.0.1:1"), start),
        httpx.AsyncClient(base_url=await address(pool), trust_env=False, timeout=60) as client,
    ):
        await registered(client)
        answer = await client.post("/api/execute", json={"path": "examples/hello"})

    assert answer.status_code == 202


async def test_a_stop_answers_who_waits_and_then_refuses_connections(
    database: str, pool: Pool, nats_url: str
) -> None:
    await an_execution(pool, 1)
    async with serving(a_service(database, nats_url), start) as service:
        url = await address(pool)
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
            waiting = asyncio.create_task(client.get("/api/executions/1?wait=60", timeout=60))
            await asyncio.sleep(0.3)
            service.begin_stop()
            answer = await asyncio.wait_for(waiting, 30)

    assert msgspec.json.decode(answer.content)["status"] == "RUNNING"
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
        try:
            await client.get("/health")
        except httpx.ConnectError:
            return
    raise AssertionError("somebody still listens")
