"""Reads noetl.inbox, JetStream, noetl.catalog. Writes noetl.event, noetl.command, noetl.result_ref.

The only service that writes the log, and only of the shards whose lease it holds.
"""

import asyncio
from functools import partial

from noetl_core.blob.results import open_results
from noetl_core.bus.connection import Bus, open_bus
from noetl_core.bus.consume import Delivery, ShardConsumer
from noetl_core.domain.errors import ShardLostError
from noetl_core.domain.ids import ShardId
from noetl_core.process.membership import Member, join_runtime
from noetl_core.process.ownership import ShardOwner
from noetl_core.process.resilience import retrying
from noetl_core.process.service import Part, Service, run_service
from noetl_core.store import event, setting
from noetl_core.store.execution_shard import Claim
from noetl_core.store.postgres import Pool, open_pool

from noetl_broker.advance import Broker
from noetl_broker.config import BrokerConfig
from noetl_broker.dispatch import dispatch
from noetl_broker.intake import Intake
from noetl_broker.states import States


async def start(service: Service[BrokerConfig]) -> None:
    config = service.config
    pool = await service.open(open_pool(config.postgres_dsn, role="noetl_broker", size_max=4))
    bus = await service.open(open_bus(config.nats_url, name=config.instance))
    member = await service.open(join_runtime(service, pool, kind="broker"))
    consumer = await service.open(ShardConsumer(bus))
    owner = await _own_shards(service, pool, member, consumer)
