"""A whole broker whose NATS is nowhere: it reads the inbox, and closes its epochs by itself."""

import asyncio

from noetl_broker.config import BrokerConfig
from noetl_broker.main import start
from noetl_core.domain.ids import ExecutionId
from noetl_core.process.service import Service, serving
from noetl_core.store import inbox
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Start, encode_messages
from services.broker.desk import Desk
from services.broker.test_pump import STEP


async def test_epochs_are_closed_while_nobody_can_ask_for_it(pool: Pool, database: str) -> None:
    desk = Desk(pool)
    execution_id = ExecutionId(desk.mint())
    message = Start(
        execution_id=execution_id, catalog_id=await desk.register(STEP), path="p", version=1
    )
    await inbox.promise(pool, execution_id, encode_messages([message]))
    config = BrokerConfig(
        postgres_dsn=database, nats_url="nats://127.0.0.1:1", checkpoint_interval_ms=100
    )

    async with serving(Service("broker", config), start), asyncio.timeout(60):
        while "checkpoint.committed" not in await desk.types(execution_id):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)

    found = await desk.types(execution_id)
    assert found.count("checkpoint.committed") == 1, "nothing moved after the first"
    assert await pool.fetchval("SELECT count(*) FROM noetl.inbox") == 0
