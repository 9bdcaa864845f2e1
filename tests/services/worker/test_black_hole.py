"""A connection that is dead without a word must not cost a healthy worker its commands."""

import asyncio
import socket

import pytest

from noetl_core.store.postgres import (
    LINE_DEAD_SECONDS,
    LINE_PROBE_IDLE_SECONDS,
    LINE_PROBE_SECONDS,
    LINE_PROBES,
    TRANSACTION_IDLE_SECONDS,
    Pool,
    open_pool,
)
from services.worker.desk import config, issue, listening, playbook, register, working
from support.black_hole import way_to

LEASE_SECONDS = 5.0

SLEEPS = """
- step: a
  tool:
    kind: python
    code: |
      import time
      time.sleep(9)
      result = 1
"""

LIMITS = (
    "SELECT name, setting::integer FROM pg_settings WHERE name LIKE 'tcp%' OR name LIKE 'idle_in%'"
)
LEFT = "SELECT extract(epoch FROM lease_until - now())::float8 FROM noetl.command"


@pytest.mark.slow
async def test_a_connection_that_swallows_everything_costs_no_lease(
    database: str, pool: Pool, nats_url: str
) -> None:
    key = await issue(pool, await register(pool, playbook(SLEEPS)), "a")
    async with listening(nats_url, pool) as ear, way_to(database) as (dsn, way):
        settings = config(
            dsn, nats_url, lease_seconds=LEASE_SECONDS, heartbeat_seconds=0.5, drain_seconds=0.1
        )
        async with working(settings):
            async with asyncio.timeout(60):
                while not ear.claims:  # noqa: ASYNC110 - the worker is on another loop's thread
                    await asyncio.sleep(0.02)
            before = way.connections
            way.swallow()
            left = []
            for _ in range(65):
                await asyncio.sleep(0.1)
                left.append(await pool.fetchval(LEFT))
            assert way.connections > before, "the heartbeat has another connection"
            assert min(left) > 0, left
            assert await ear.done(key) == 1
            await way.close()


async def test_the_kernel_watches_the_line_to_postgres(database: str) -> None:
    async with open_pool(database, role="", size_max=1) as pool, pool.acquire() as conn:
        line = conn._con._transport.get_extra_info("socket")  # type: ignore[attr-defined]
        dead_ms = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1

    assert dead_ms == LINE_DEAD_SECONDS * 1000


async def test_the_server_watches_the_line_to_us_and_waits_for_no_transaction_of_ours(
    database: str,
) -> None:
    async with open_pool(database, role="", size_max=1) as pool:
        limits = {row["name"]: row["setting"] for row in await pool.fetch(LIMITS)}

    assert limits == {
        "idle_in_transaction_session_timeout": TRANSACTION_IDLE_SECONDS * 1000,
        "tcp_keepalives_idle": LINE_PROBE_IDLE_SECONDS,
        "tcp_keepalives_interval": LINE_PROBE_SECONDS,
        "tcp_keepalives_count": LINE_PROBES,
        "tcp_user_timeout": LINE_DEAD_SECONDS * 1000,
    }
