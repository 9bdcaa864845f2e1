"""Invariant 2 across owners, in the service as it starts: a new owner's clock may be behind, and
still its events come after everything that its shard, or the last change of the count, has seen.
"""

import asyncio
from itertools import count

import pytest

from noetl_broker.config import BrokerConfig
from noetl_broker.main import start
from noetl_core.domain.ids import EventId, ExecutionId, ShardId
from noetl_core.domain.sharding import SHARD_COUNT_DEFAULT, shard_of
from noetl_core.domain.snowflake import Snowflake
from noetl_core.process import membership
from noetl_core.process.clock import unix_ms
from noetl_core.process.service import Service, serving
from noetl_core.store import inbox
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Start, encode_messages
from services.broker.desk import Desk
from services.broker.test_advance import CHAIN

BEHIND_MS = 60_000
WAIT_SECONDS_MAX = 60.0


async def first_event(pool: Pool, execution_id: ExecutionId) -> EventId:
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        while True:
            found = await pool.fetchval(
                "SELECT min(event_id) FROM noetl.event WHERE execution_id = $1", execution_id
            )
            if found is not None:
                return EventId(found)
            await asyncio.sleep(0.02)


def shard(execution_id: ExecutionId) -> ShardId:
    return shard_of(execution_id, shard_count=SHARD_COUNT_DEFAULT)


@pytest.fixture
def clock_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "unix_ms", lambda: unix_ms() - BEHIND_MS)


async def begin_with_a_broker(pool: Pool, config: BrokerConfig, execution_id: ExecutionId) -> int:
    """The first event that a broker writes for an execution that waits for one."""
    catalog_id = await Desk(pool).register(CHAIN)
    begin = Start(execution_id=execution_id, catalog_id=catalog_id, path="p", version=1)
    await inbox.promise(pool, execution_id, encode_messages([begin]))
    async with serving(Service("broker", config), start):
        return await first_event(pool, execution_id)


@pytest.mark.usefixtures("clock_is_behind")
async def test_a_broker_whose_clock_is_behind_writes_after_the_newest_event_of_the_shard(
    pool: Pool, database: str, nats_url: str
) -> None:
    before = Desk(pool)
    await before.claim(lease_seconds=0.0)
    earlier = await before.start(CHAIN)
    newest = await pool.fetchval("SELECT max(event_id) FROM noetl.event")
    later = next(
        one for one in map(ExecutionId, count(earlier + 1)) if shard(one) == shard(earlier)
    )

    config = BrokerConfig(postgres_dsn=database, nats_url=nats_url)
    first = await begin_with_a_broker(pool, config, later)

    assert first > newest


@pytest.mark.usefixtures("clock_is_behind")
async def test_a_broker_whose_clock_is_behind_writes_after_the_last_change_of_the_shard_count(
    pool: Pool, database: str, nats_url: str
) -> None:
    switch_id = Snowflake(1, unix_ms).mint()
    await pool.execute(
        "INSERT INTO noetl.resize (resize_id, shards_from, shards_to, switch_id, switched_at,"
        " drained_at) VALUES (1, 8, 16, $1, now(), now())",
        switch_id,
    )

    config = BrokerConfig(postgres_dsn=database, nats_url=nats_url)
    first = await begin_with_a_broker(pool, config, ExecutionId(Snowflake(2, unix_ms).mint()))

    assert first > switch_id
