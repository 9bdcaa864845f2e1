"""Reads noetl.command, noetl.execution and noetl.timer. Tells the broker by NATS, else by
noetl.inbox. Flags in noetl.dead_letter what nothing can move.
"""

import asyncio

from noetl_core.bus.connection import open_bus
from noetl_core.domain.ids import ExecutionId
from noetl_core.process.leader import leadership
from noetl_core.process.membership import join_runtime
from noetl_core.process.service import Part, Service, run_service
from noetl_core.store import timer
from noetl_core.store.command import CommandKey
from noetl_core.store.postgres import open_pool
from noetl_core.store.timer import DueTimer
from noetl_reaper.config import ReaperConfig
from noetl_reaper.count import QueueCount
from noetl_reaper.lost import LostCommands
from noetl_reaper.patience import Patience
from noetl_reaper.reported import Reported
from noetl_reaper.sweep import (
    flag_stuck,
    stand_by,
    sweep_executions,
    sweep_leases,
    sweep_queue,
    sweep_timers,
)

QUEUE_SECONDS = 5.0
"""How often the queue is counted, at most."""


async def start(service: Service[ReaperConfig]) -> None:
    config = service.config
    patience = Patience(
        wait_seconds=config.reaper_return_wait_seconds,
        late_seconds=config.reaper_interval_seconds + config.reaper_lease_grace_seconds,
    )
    pool = await service.open(open_pool(config.postgres_dsn, role="noetl_reaper", size_max=3))
    bus = await service.open(open_bus(config.nats_url, name=config.instance))
    member = await service.open(join_runtime(service, pool, kind="reaper"))
    leader = await service.open(leadership(service, pool, member, "reaper"))
    commands: Reported[CommandKey] = Reported(repeat_seconds=config.reaper_repeat_seconds)
    executions: Reported[ExecutionId] = Reported(repeat_seconds=config.reaper_repeat_seconds)
    timers: Reported[DueTimer] = Reported(repeat_seconds=config.reaper_repeat_seconds)
    incomplete: Reported[ExecutionId] = Reported(repeat_seconds=config.reaper_repeat_seconds)
    lost = LostCommands()
    limit = config.reaper_batch_size
    wake_timers = asyncio.Event()
    count = QueueCount(pool)

    async def leases() -> int:
        if not leader.is_leader:
            await stand_by(pool, patience)
            return 0
        grace = config.reaper_lease_grace_seconds
        return await sweep_leases(pool, bus, commands, patience, grace_seconds=grace, limit=limit)

    async def idle() -> int:
        if not leader.is_leader:
            return 0
        seconds = config.reaper_idle_seconds
        return await sweep_executions(pool, bus, executions, idle_seconds=seconds, limit=limit)

    async def unqueued() -> None:
        # Never at once again: between two looks the projection must have had time to come along.
        await sweep_queue(pool, bus, incomplete, lost, leads=leader.is_leader, limit=limit)

    async def flags() -> int:
        if not leader.is_leader:
            return 0
        # Not before the broker has been told a few times.
        seconds = max(config.reaper_stuck_seconds, 2 * config.reaper_idle_seconds)
        return await flag_stuck(pool, stuck_seconds=seconds, limit=limit)

    async def due() -> int:
        if not leader.is_leader:
            return 0
        told = await sweep_timers(pool, bus, timers, limit=limit)
        seconds = await timer.next_due(pool, within_seconds=config.reaper_timer_poll_seconds)
        if seconds is not None:
            asyncio.get_running_loop().call_later(seconds, wake_timers.set)
        return told

    async def queue() -> None:
        await count.turn(leads=leader.is_leader)

    service.every(config.reaper_interval_seconds, leases, name="leases")
    service.every(QUEUE_SECONDS, queue, name="queue")
    service.every(config.reaper_idle_interval_seconds, idle, name="executions")
    service.every(config.reaper_idle_interval_seconds, unqueued, name="lost")
    service.every(config.reaper_idle_interval_seconds, flags, name="flags")
    service.every(config.reaper_timer_poll_seconds, due, wake=wake_timers, name="timers")


SERVICE = Part("reaper", ReaperConfig, start)


def main() -> None:
    run_service(*SERVICE)
