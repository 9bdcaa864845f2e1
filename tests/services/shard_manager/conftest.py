from collections.abc import AsyncIterator

import pytest

from noetl_core.store.postgres import Pool, open_pool


@pytest.fixture
async def manager_pool(database: str) -> AsyncIterator[Pool]:
    async with open_pool(database, role="noetl_shard_manager", size_max=2) as opened:
        yield opened
