"""Reads noetl.inbox, JetStream, noetl.catalog and noetl.checkpoint. Writes noetl.event,
noetl.command, noetl.result_ref.

The only service that writes the log, and only of the shards whose lease it holds.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

from noetl_broker.advance import Broker
from noetl_broker.config import BrokerConfig
from noetl_broker.intake import Intake
from noetl_broker.left import look_back
from noetl_broker.placing import WATCH_SECONDS, WorkerWatch
from noetl_broker.pump import Pump
from noetl_broker.states import States
from noetl_broker.tracing import TELL_SECONDS, StepSpans
from noetl_core.blob.result_store import ResultStore
from noetl_core.bus.connection import Bus, open_bus
from noetl_core.bus.consume import ShardConsumer, open_consumer
from noetl_core.domain.ids import EpochId, ShardId
from noetl_core.process.membership import Member, join_runtime
from noetl_core.process.ownership import ShardOwner
from noetl_core.process.service import Part, Service, run_service
from noetl_core.process.stores import open_results
from noetl_core.process.telemetry import spans
from noetl_core.store import event, resize, setting
from noetl_core.store.command import QUEUE_SETTINGS
from noetl_core.store.event import EventRow
from noetl_core.store.execution_shard import Claim
from noetl_core.store.postgres import Pool, open_pool
from noetl_core.store.resize import Generation
from noetl_core.wire.messages import Barrier, encode_messages
from noetl_core.wire.subjects import ANY_INBOX_WAKE, EPOCHS_CLOSE, shards_wake

_MB = 1024 * 1024


async def start(service: Service[BrokerConfig]) -> None:
    config = service.config
    pool = await service.open(_open_pool(config))
    bus = await service.open(open_bus(config.nats_url, name=config.instance))
    member = await service.open(join_runtime(service, pool, kind="broker"))
    consumer = await service.open(open_consumer(bus))
    states = _states(config, shard_count=await setting.shard_count(pool))

    async def gained(claims: Sequence[Claim]) -> None:
        shards = [claim.shard_id for claim in claims]
        generation = await _pass_over_log(pool, member, shards)
        left = await look_back(pool, shards, generation)
        broker.take_over(left, shard_count=generation.shard_count)

    async def lost(shard: ShardId) -> None:
        await consumer.remove(shard)
        broker.forget_shards([shard])

    async def keep() -> None:
        before = set(owner.held())
        await owner.keep()
        for shard in owner.held():
            await consumer.add(shard)
        if owner.held().keys() - before:
            await intake.look_into_inbox()

    async def look_at_shards(_body: bytes) -> None:
        wanted.set()

    async def close_epochs() -> None:
        # The checkpointer cannot tell us while NATS is away; what it records is the same.
        if not bus.is_connected:
            await intake.close_epochs(_barriers(owner.held(), member.mint()))

    wanted = asyncio.Event()
    owner = ShardOwner(
        pool,
        member,
        role="broker",
        lease_seconds=config.shard_held_seconds,
        heartbeat_seconds=config.shard_renew_seconds,
        on_gain=gained,
        on_loss=lost,
        on_release=partial(bus.wake, shards_wake("broker")),
    )
    workers = WorkerWatch(pool)
    results = await service.open(open_results(config))
    broker = _broker(config, pool, results, states, owner, member, workers)
    intake = _intake(config, pool, bus, consumer, owner)
    pump = Pump(
        broker,
        intake,
        bus,
        held=owner.held,
        renew=keep,
        stopping=service.stopping,
        note=_note(service, pool),
    )
    await keep()
    service.every(WATCH_SECONDS, workers.look, name="watch workers")
    service.on_stop(owner.release)
    service.every(config.shard_look_seconds, keep, wake=wanted, name="own shards")
    await bus.subscribe(shards_wake("broker"), look_at_shards)
    await bus.subscribe(ANY_INBOX_WAKE, intake.look_into_inbox)
    await bus.subscribe(EPOCHS_CLOSE, intake.close_epochs)
    service.every(config.checkpoint_interval_ms / 1000, close_epochs, name="close epochs")
    service.every(0.0, pump.turn, name="advance")


async def _pass_over_log(pool: Pool, member: Member, shards: Sequence[ShardId]) -> Generation:
    """From now on mint above all that these shards have. Says by how many shards to count.

    Events of a shard ascend by id even when its new owner's clock is behind the last one's, and
    those of an execution even when its earlier ones lie on another shard.
    """
    member.pass_over(await event.newest_event_id(pool, shards))
    generation = await resize.current(pool)
    member.pass_over(generation.switch_id)
    return generation


def _states(config: BrokerConfig, *, shard_count: int) -> States:
    return States(
        states_max=config.broker_states_max,
        bytes_max=round(config.broker_states_mb * _MB),
        shard_count=shard_count,
    )


def _broker(
    config: BrokerConfig,
    pool: Pool,
    results: ResultStore,
    states: States,
    owner: ShardOwner,
    member: Member,
    workers: WorkerWatch,
) -> Broker:
    return Broker(
        pool,
        results,
        states,
        held=owner.held,
        mint=member.mint,
        workers=lambda: workers.seen,
        attempts_max=config.command_attempts_max,
    )


def _intake(
    config: BrokerConfig, pool: Pool, bus: Bus, consumer: ShardConsumer, owner: ShardOwner
) -> Intake:
    return Intake(
        pool,
        consumer.queue,
        held=owner.held,
        batch_size=config.broker_batch_size,
        inbox_poll_seconds=lambda: _inbox_poll_seconds(config, bus),
    )


def _barriers(shards: Iterable[ShardId], epoch: int) -> bytes:
    return encode_messages([Barrier(shard_id=one, epoch=EpochId(epoch)) for one in shards])


def _inbox_poll_seconds(config: BrokerConfig, bus: Bus) -> float:
    if bus.is_connected:
        return config.broker_inbox_poll_seconds
    return config.broker_inbox_poll_away_seconds


def _note(
    service: Service[BrokerConfig], pool: Pool
) -> Callable[[Iterable[EventRow]], None] | None:
    """Whom to show what was committed, where somebody wants traces."""
    told = spans("broker")
    if told is None:
        return None
    traces = StepSpans(pool, told)
    service.every(TELL_SECONDS, traces.tell, name="trace")
    service.on_stop(traces.tell)
    return traces.note


def _open_pool(config: BrokerConfig) -> AbstractAsyncContextManager[Pool]:
    # Arrays of any length go through the same few statements: planning them anew for each length
    # took a quarter of a commit.
    return open_pool(
        config.postgres_dsn,
        role="noetl_broker",
        size_max=4,
        settings=QUEUE_SETTINGS | {"plan_cache_mode": "force_generic_plan"},
    )


SERVICE = Part("broker", BrokerConfig, start)


def main() -> None:
    run_service(*SERVICE)
