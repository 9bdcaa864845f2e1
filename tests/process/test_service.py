"""process/service.py: the life of a service."""

from noetl_core.process.config import Config
from noetl_core.process.membership import join_runtime
from noetl_core.process.service import Service, serving
from noetl_core.store.postgres import open_pool


async def test_a_service_opens_a_pool_under_its_role_and_joins(database: str) -> None:
    seen: list[object] = []

    async def start(service: Service[Config]) -> None:
        pool = await service.open(open_pool(database, role="noetl_broker", size_max=2))
        member = await service.open(join_runtime(service, pool, kind="broker"))
        seen.append(await pool.fetchval("SELECT current_user"))
        seen.append(member.mint() > 0)

    async with serving(Service("broker", Config(postgres_dsn=database)), start):
        pass

    assert seen == ["noetl_broker", True]
