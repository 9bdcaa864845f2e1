"""Reads and sweeps noetl.runtime and noetl.execution_shard. Publishes the topology on NATS."""

from noetl_core.bus.connection import open_bus
from noetl_core.process.leader import leadership
from noetl_core.process.membership import join_runtime
from noetl_core.process.service import Part, Service, run_service
from noetl_core.store.postgres import open_pool
from noetl_shard_manager.assign import Known, assign
from noetl_shard_manager.config import ShardManagerConfig


async def start(service: Service[ShardManagerConfig]) -> None:
    config = service.config
    pool = await service.open(
        open_pool(config.postgres_dsn, role="noetl_shard_manager", size_max=2)
    )
    bus = await service.open(open_bus(config.nats_url, name=config.instance))
    member = await service.open(join_runtime(service, pool, kind="shard-manager"))
    leader = await service.open(leadership(service, pool, member, "shard-manager"))
    known = Known()

    async def turn() -> None:
        if leader.is_leader:
            await assign(
                pool,
                bus,
                known,
                offline_seconds=config.runtime_offline_seconds,
                forget_seconds=config.runtime_forget_seconds,
            )

    service.every(config.shard_manager_interval_seconds, turn, name="assign")


SERVICE = Part("shard-manager", ShardManagerConfig, start)


def main() -> None:
    run_service(*SERVICE)
