"""Right after Postgres was away, a lease that ran out says nothing of its worker."""

import asyncio
import shutil
from collections.abc import AsyncIterator

import asyncpg
import pytest

from noetl_core.process.service import Service, serving
from noetl_core.store.migrations import migrate
from noetl_core.wire.messages import Expired, decode_messages
from noetl_reaper.config import ReaperConfig
from noetl_reaper.main import start
from noetl_reaper.outage import Outage
from support.clock import FakeClock
from support.postgres import PostgresServer, scratch_directory

GRACE_SECONDS = 3.0
NOWHERE = "nats://127.0.0.1:1"


async def refused() -> int:
    raise ConnectionRefusedError("away")


async def found() -> int:
    return 7


async def test_no_turn_is_run_until_postgres_has_answered_for_a_while() -> None:
    clock = FakeClock()
    outage = Outage(grace_seconds=GRACE_SECONDS, clock=clock)
    assert await outage.unless_recent(found, probe=found) == 7

    with pytest.raises(ConnectionRefusedError):
        await outage.unless_recent(refused, probe=found)
    clock.advance(GRACE_SECONDS - 0.1)
    with pytest.raises(ConnectionRefusedError):
        await outage.unless_recent(found, probe=refused)

    clock.advance(GRACE_SECONDS - 0.1)
    assert await outage.unless_recent(found, probe=found) == 0
    clock.advance(0.2)
    assert await outage.unless_recent(found, probe=found) == 7


@pytest.fixture
async def own_postgres() -> AsyncIterator[PostgresServer]:
    """With our schema; this test stops and starts it."""
    server = PostgresServer(scratch_directory("noetl-postgres-"))
    try:
        server.initialise()
        server.start()
        conn = await asyncpg.connect(server.dsn())
        await migrate(conn)
        await conn.close()
        yield server
    finally:
        server.kill()
        shutil.rmtree(server.directory, ignore_errors=True)


async def test_a_worker_that_renews_after_an_outage_keeps_its_commands_and_a_dead_one_does_not(
    own_postgres: PostgresServer,
) -> None:
    conn = await asyncpg.connect(own_postgres.dsn())
    await conn.executemany(
        "INSERT INTO noetl.command (execution_id, command_id, shard_id, step, status, worker_id,"
        " lease_until, payload) VALUES (1, $1, 0, 's', 'leased', $2,"
        " now() + interval '1.5 seconds', '')",
        [("s.1/0#1", "alive"), ("s.1/1#1", "dead")],
    )
    await conn.close()
    config = ReaperConfig(
        postgres_dsn=own_postgres.dsn(),
        nats_url=NOWHERE,
        reaper_interval_seconds=0.1,
        reaper_lease_grace_seconds=0.0,
        reaper_outage_grace_seconds=GRACE_SECONDS,
    )

    async with serving(Service("reaper", config), start):
        await asyncio.sleep(0.3)
        own_postgres.stop()
        await asyncio.sleep(2.0)
        own_postgres.start()
        await asyncio.sleep(1.0)  # as long as a heartbeat may take to try again
        conn = await asyncpg.connect(own_postgres.dsn())
        await conn.execute(
            "UPDATE noetl.command SET lease_until = now() + interval '1 hour'"
            " WHERE worker_id = 'alive'"
        )
        async with asyncio.timeout(GRACE_SECONDS + 10):
            while not (rows := await conn.fetch("SELECT body FROM noetl.inbox")):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await conn.close()

    reported = [one for row in rows for one in decode_messages(row["body"])]
    assert [one.command_id for one in reported if isinstance(one, Expired)] == ["s.1/1#1"]
