"""Reads noetl.event. Writes noetl.execution and noetl.projection_checkpoint. Routes nothing."""

import asyncio
from collections.abc import Sequence
from functools import partial

from noetl_core.bus.connection import Bus, open_bus
from noetl_core.domain.ids import ShardId
from noetl_core.process.membership import join_runtime
from noetl_core.process.ownership import ShardOwner
from noetl_core.process.service import Part, Service, run_service
from noetl_core.process.telemetry import spans
from noetl_core.store.execution_shard import Claim
from noetl_core.store.postgres import open_pool
from noetl_core.wire.messages import encode_ids
from noetl_core.wire.subjects import (
    EPOCHS_CLOSE,
    EPOCHS_PROJECTED,
    EXECUTIONS_ENDED,
    LOG_ENDED,
    log_wake,
    shards_wake,
)
from noetl_projection.audit import Round, audit
from noetl_projection.config import ProjectionConfig
from noetl_projection.memory import Memory
from noetl_projection.pace import Pace
from noetl_projection.project import project
from noetl_projection.tracing import tell_ended

_MB = 1024 * 1024


async def start(service: Service[ProjectionConfig]) -> None:
    config = service.config
    pool = await service.open(open_pool(config.postgres_dsn, role="noetl_projection", size_max=4))
    bus = await service.open(open_bus(config.nats_url, name=config.instance))
    member = await service.open(join_runtime(service, pool, kind="projection"))
    memory = Memory(
        executions_max=config.projection_executions_max,
        bytes_max=round(config.projection_states_mb * _MB),
    )
    pace = Pace(config.projection_batch_window_ms / 1000)
    grown, urgent, wanted = asyncio.Event(), asyncio.Event(), asyncio.Event()
    heard: set[ShardId] = set()

    async def hear(body: bytes) -> None:
        if body == LOG_ENDED or pace.is_hurried:
            urgent.set()
        grown.set()

    async def expect_close(_body: bytes) -> None:
        pace.hurry()

    async def gained(claims: Sequence[Claim]) -> None:
        grown.set()
        for shard in {claim.shard_id for claim in claims} - heard:
            heard.add(shard)
            await bus.subscribe(log_wake(shard), hear)

    async def look_at_shards(_body: bytes) -> None:
        wanted.set()

    owner = ShardOwner(
        pool,
        member,
        role="projection",
        lease_seconds=config.shard_held_seconds,
        heartbeat_seconds=config.shard_renew_seconds,
        on_gain=gained,
        on_release=partial(bus.wake, shards_wake("projection")),
    )
    told = spans("projection")
    audited = Round()

    async def turn() -> bool:
        if not memory.behind:
            await pace.pause(unless=urgent)
        urgent.clear()
        await project(pool, owner, memory, batch_size=config.projection_batch_size)
        await _tell(bus, memory)
        if told is not None:
            tell_ended(told, memory.ended_rows)
        return memory.behind > 0

    async def look_again() -> None:
        limit = config.projection_audit_executions
        await audit(pool, owner.held(), limit=limit, at=audited)

    service.every(config.shard_look_seconds, owner.keep, wake=wanted, name="ownership")
    await bus.subscribe(shards_wake("projection"), look_at_shards)
    await bus.subscribe(EPOCHS_CLOSE, expect_close)
    service.on_stop(owner.release)
    service.every(config.projection_poll_ms / 1000, turn, wake=grown, name="project")
    if config.projection_audit_interval_seconds:
        service.every(config.projection_audit_interval_seconds, look_again, name="audit")


async def _tell(bus: Bus, memory: Memory) -> None:
    """Whoever waits for what the last turn has shown."""
    if memory.ended:
        await bus.wake(EXECUTIONS_ENDED, encode_ids(memory.ended))
    if memory.has_closed:
        await bus.wake(EPOCHS_PROJECTED)


SERVICE = Part("projection", ProjectionConfig, start)


def main() -> None:
    run_service(*SERVICE)
