"""Sweeps noetl.runtime and noetl.metric, keeps noetl.execution_shard. Publishes the topology.

Everything it does can wait: owners renew, claim orphans and share fairly while it is down.
"""

import asyncio

from noetl_core.bus.connection import open_bus
from noetl_core.process.leader import leadership
from noetl_core.process.membership import join_runtime
from noetl_core.process.service import Part, Service, run_service
from noetl_core.store.postgres import open_pool
from noetl_core.wire.subjects import RESIZE_WISHED
from noetl_shard_manager import metrics
from noetl_shard_manager.assign import Known, assign
from noetl_shard_manager.balance import balance
from noetl_shard_manager.config import ShardManagerConfig
from noetl_shard_manager.sweep import Hearing, measure, sweep
from noetl_shard_manager.switch import clear_up, switch, wish_for_first


async def start(service: Service[ShardManagerConfig]) -> None:
    config = service.config
    pool = await service.open(
        open_pool(config.postgres_dsn, role="noetl_shard_manager", size_max=2)
    )
    bus = await service.open(open_bus(config.nats_url, name=config.instance))
    member = await service.open(join_runtime(service, pool, kind="shard-manager"))
    leader = await service.open(leadership(service, pool, member, "shard-manager"))
    known = Known()
    hearing = Hearing(late_seconds=config.server_sweep_interval + config.server_offline_after / 3)
    sweep_ms: float | None = None

    def mint_above(floor: int) -> int:
        member.pass_over(floor)
        return member.mint()

    async def turn() -> None:
        if not leader.is_leader:
            metrics.show_nothing()
            return
        await wish_for_first(pool, shard_count=config.shard_count, mint=member.mint)
        # After a switch owners claim anew: what they make of it is looked at in the next turn.
        if not await switch(pool, bus, mint_above=mint_above):
            await balance(pool, bus)
        await clear_up(pool, quiet_seconds=config.shard_retire_seconds)
        await assign(pool, bus, known)

    async def sweeping() -> None:
        nonlocal sweep_ms
        heard_seconds = await hearing.look(pool)
        if leader.is_leader:
            sweep_ms = await sweep(
                pool,
                offline_seconds=config.server_offline_after,
                forget_seconds=config.runtime_forget_seconds,
                heard_seconds=heard_seconds,
            )

    async def measuring() -> bool:
        keep = config.metrics_keep_seconds
        return leader.is_leader and await measure(
            pool, name=member.name, keep_seconds=keep, sweep_ms=sweep_ms
        )

    async def wished(_body: bytes) -> None:
        wish.set()

    wish = asyncio.Event()
    await bus.subscribe(RESIZE_WISHED, wished)
    service.every(config.shard_manager_interval_seconds, turn, wake=wish, name="assign")
    service.every(config.server_sweep_interval, sweeping, name="sweep")
    service.every(config.server_metrics_interval, measuring, name="measure")


SERVICE = Part("shard-manager", ShardManagerConfig, start)


def main() -> None:
    run_service(*SERVICE)
