"""Reads noetl.event and the projection's watermarks. Writes noetl.checkpoint; tells the brokers."""

import asyncio

from noetl_checkpointer.commit_epoch import (
    Progress,
    close_epoch,
    commit_epoch,
    forget_ended,
    watch_ages,
)
from noetl_checkpointer.config import CheckpointerConfig
from noetl_checkpointer.metrics import show_ages
from noetl_core.bus.connection import open_bus
from noetl_core.process.leader import leadership
from noetl_core.process.membership import join_runtime
from noetl_core.process.service import Part, Service, run_service
from noetl_core.store.postgres import open_pool
from noetl_core.wire.subjects import EPOCHS_PROJECTED

WATCH_SECONDS = 1.0


async def start(service: Service[CheckpointerConfig]) -> None:
    config = service.config
    pool = await service.open(open_pool(config.postgres_dsn, role="noetl_checkpointer", size_max=3))
    bus = await service.open(open_bus(config.nats_url, name=config.instance))
    member = await service.open(join_runtime(service, pool, kind="checkpointer"))
    leader = await service.open(leadership(service, pool, member, "checkpointer"))
    progress, term = Progress(), 0
    projected = asyncio.Event()

    def led() -> Progress | None:
        """Where we stand in this term of office; None while somebody else leads."""
        nonlocal progress, term
        if term != leader.epoch:
            progress, term = Progress(), leader.epoch
        return progress if leader.is_leader else None

    def mint_above(floor: int) -> int:
        member.pass_over(floor)
        return member.mint()

    async def close() -> None:
        if (at := led()) is not None:
            await close_epoch(pool, bus, at, mint_above=mint_above)

    async def commit() -> None:
        if (at := led()) is not None:
            await commit_epoch(pool, at, batch_size=config.checkpoint_batch_size)

    async def watch() -> None:
        if (at := led()) is not None:
            await watch_ages(pool, at)
            await forget_ended(pool, at)
        elif not leader.has_led:
            show_ages((), {})

    async def hear(_body: bytes) -> None:
        projected.set()

    await bus.subscribe(EPOCHS_PROJECTED, hear)
    service.every(config.checkpoint_interval_ms / 1000, close, name="close_epoch")
    service.every(WATCH_SECONDS, watch, name="watch_ages")
    service.every(
        config.checkpoint_record_interval_ms / 1000, commit, wake=projected, name="commit_epoch"
    )


SERVICE = Part("checkpointer", CheckpointerConfig, start)


def main() -> None:
    run_service(*SERVICE)
