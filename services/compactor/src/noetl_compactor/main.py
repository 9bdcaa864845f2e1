"""Makes the partitions of noetl.event and noetl.result_ref ahead of time, archives what is past
retention and drops it, removes results that have expired. The only one who takes rows out of the
log, through a function that demands their archive.
"""

from datetime import UTC, datetime

from noetl_compactor.archive import Resting, Rules, archive_past
from noetl_compactor.compact import Told, compact
from noetl_compactor.config import CompactorConfig
from noetl_compactor.expire import KEY_DAYS_MIN, Backlog, expire, forget_keys
from noetl_compactor.metrics import show_nothing
from noetl_compactor.past import kept_from
from noetl_core.process.clock import unix_ms
from noetl_core.process.leader import leadership
from noetl_core.process.membership import join_runtime
from noetl_core.process.service import Part, Service, run_service
from noetl_core.process.stores import open_archives, open_tiers
from noetl_core.store.archive import COPY_SETTINGS
from noetl_core.store.postgres import clock_of, open_pool


async def start(service: Service[CompactorConfig]) -> None:
    config = service.config
    pool = await service.open(
        open_pool(config.postgres_dsn, role="noetl_compactor", size_max=3, settings=COPY_SETTINGS)
    )
    member = await service.open(join_runtime(service, pool, kind="compactor"))
    leader = await service.open(leadership(service, pool, member, "compactor"))
    archives = await service.open(open_archives(config))
    tiers = await service.open(open_tiers(config))
    told = Told()
    resting = Resting()
    backlog = Backlog()

    async def make_partitions() -> None:
        if leader.is_leader:
            # By the one clock that all share: a week that is not made in time cannot be made later.
            now_ms = round(await clock_of(pool) * 1000)
            await compact(pool, told, now_ms=now_ms, weeks_ahead=config.partition_weeks_ahead)
        else:
            show_nothing()

    async def remove_expired() -> bool:
        if not leader.is_leader:
            return False
        await expire(pool, tiers, backlog)
        return backlog.is_left

    async def archive() -> None:
        if leader.is_leader:
            days = config.retention_days
            from_ms = await kept_from(pool, own_ms=unix_ms(), retention_days=days)
            assert archives is not None  # the configuration demands a place
            await archive_past(pool, Rules(archives, member.mint, from_ms, resting=resting))
            keys_days = max(days, KEY_DAYS_MIN)
            keys_from_ms = await kept_from(pool, own_ms=unix_ms(), retention_days=keys_days)
            await forget_keys(pool, before=datetime.fromtimestamp(keys_from_ms / 1000, UTC))

    service.every(config.compactor_interval_seconds, make_partitions, name="compact")
    service.every(config.compactor_interval_seconds, remove_expired, name="expire")
    if config.compactor_enabled:
        service.every(config.compactor_interval_seconds, archive, name="archive")


SERVICE = Part("compactor", CompactorConfig, start)


def main() -> None:
    run_service(*SERVICE)
