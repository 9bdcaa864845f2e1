"""Makes the partitions of noetl.event and noetl.result_ref ahead of time. Touches no row."""

from noetl_compactor.compact import Told, compact
from noetl_compactor.config import CompactorConfig
from noetl_core.process.clock import unix_ms
from noetl_core.process.leader import leadership
from noetl_core.process.membership import join_runtime
from noetl_core.process.service import Part, Service, run_service
from noetl_core.store.postgres import open_pool


async def start(service: Service[CompactorConfig]) -> None:
    config = service.config
    pool = await service.open(open_pool(config.postgres_dsn, role="noetl_compactor", size_max=2))
    member = await service.open(join_runtime(service, pool, kind="compactor"))
    leader = await service.open(leadership(service, pool, member, "compactor"))
    told = Told()

    async def turn() -> None:
        if leader.is_leader:
            await compact(pool, told, now_ms=unix_ms(), weeks_ahead=config.partition_weeks_ahead)

    service.every(config.compactor_interval_seconds, turn, name="compact")


SERVICE = Part("compactor", CompactorConfig, start)


def main() -> None:
    run_service(*SERVICE)
