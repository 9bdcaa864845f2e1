"""Reads noetl.inbox, JetStream and noetl.catalog. Writes noetl.event, noetl.command,
noetl.result_ref.

The only service that writes the log, and only of the shards whose lease it holds.
"""

from contextlib import AbstractAsyncContextManager

from noetl_broker.advance import Broker
from noetl_broker.config import BrokerConfig
from noetl_broker.intake import Intake
from noetl_broker.placing import WATCH_SECONDS, WorkerWatch
from noetl_broker.pump import Pump
from noetl_broker.states import States
from noetl_core.blob.result_store import ResultStore
from noetl_core.bus.connection import open_bus
from noetl_core.bus.consume import open_consumer
from noetl_core.domain.ids import ShardId
from noetl_core.process.membership import join_runtime
from noetl_core.process.ownership import ShardOwner
from noetl_core.process.service import Part, Service, run_service
from noetl_core.store import event, setting
from noetl_core.store.execution_shard import Claim
from noetl_core.store.postgres import Pool, open_pool
from noetl_core.wire.subjects import ANY_INBOX_WAKE


async def start(service: Service[BrokerConfig]) -> None:
    config = service.config
    pool = await service.open(_open_pool(config))
    bus = await service.open(open_bus(config.nats_url, name=config.instance))
    member = await service.open(join_runtime(service, pool, kind="broker"))
    consumer = await service.open(open_consumer(bus))
    states = States(
        states_max=config.broker_states_max, shard_count=await setting.shard_count(pool)
    )

    async def gained(claim: Claim) -> None:
        # Events of a shard ascend by id even when its new owner's clock is behind the last one's.
        member.pass_over(await event.newest_event_id(pool, [claim.shard_id]))

    async def lost(shard: ShardId) -> None:
        await consumer.remove(shard)
        broker.forget_shard(shard)

    async def keep() -> None:
        await owner.keep()
        for shard in owner.held():
            await consumer.add(shard)

    owner = ShardOwner(
        pool,
        member,
        role="broker",
        lease_seconds=config.shard_lease_seconds,
        heartbeat_seconds=config.shard_heartbeat_seconds,
        on_gain=gained,
        on_loss=lost,
    )
    results = ResultStore(store_dir=config.store_dir)
    workers = WorkerWatch(pool)
    broker = Broker(
        pool, results, states, held=owner.held, mint=member.mint, workers=lambda: workers.seen
    )
    intake = Intake(
        pool,
        consumer.queue,
        held=owner.held,
        batch_size=config.broker_batch_size,
        inbox_poll_seconds=config.broker_inbox_poll_seconds,
    )
    pump = Pump(broker, intake, bus, renew=keep, stopping=service.stopping)
    await keep()
    service.every(WATCH_SECONDS, workers.look, name="watch workers")
    service.on_stop(owner.release)
    service.every(config.shard_look_seconds, keep, name="own shards")
    await bus.subscribe(ANY_INBOX_WAKE, intake.look_into_inbox)
    service.every(0.0, pump.turn, name="advance")


def _open_pool(config: BrokerConfig) -> AbstractAsyncContextManager[Pool]:
    # Arrays of any length go through the same few statements: planning them anew for each length
    # took a quarter of a commit.
    return open_pool(
        config.postgres_dsn,
        role="noetl_broker",
        size_max=4,
        plan_cache_mode="force_generic_plan",
    )


SERVICE = Part("broker", BrokerConfig, start)


def main() -> None:
    run_service(*SERVICE)
