"""Reads noetl.event and the projection's watermarks. Writes noetl.checkpoint; tells the brokers."""

from noetl_checkpointer.commit_epoch import Progress, close_epoch, commit_epoch, watch_ages
from noetl_checkpointer.config import CheckpointerConfig
from noetl_core.bus.connection import open_bus
from noetl_core.process.leader import leadership
from noetl_core.process.membership import join_runtime
from noetl_core.process.service import Part, Service, run_service
from noetl_core.store.postgres import open_pool

WATCH_SECONDS = 1.0


async def start(service: Service[CheckpointerConfig]) -> None:
    config = service.config
    pool = await service.open(open_pool(config.postgres_dsn, role="noetl_checkpointer", size_max=3))
    bus = await service.open(open_bus(config.nats_url, name=config.instance))
    member = await service.open(join_runtime(service, pool, kind="checkpointer"))
    leader = await service.open(leadership(service, pool, member, "checkpointer"))
    progress = Progress()

    async def close() -> None:
        if leader.is_leader:
            await close_epoch(pool, bus, progress, mint=member.mint)

    async def commit() -> None:
        if leader.is_leader:
            await commit_epoch(pool, progress, batch_size=config.checkpoint_batch_size)

    async def watch() -> None:
        if leader.is_leader:
            await watch_ages(pool, progress)

    service.every(config.checkpoint_interval_ms / 1000, close, name="close_epoch")
    service.every(WATCH_SECONDS, watch, name="watch_ages")
    service.every(config.checkpoint_record_interval_ms / 1000, commit, name="commit_epoch")


SERVICE = Part("checkpointer", CheckpointerConfig, start)


def main() -> None:
    run_service(*SERVICE)
