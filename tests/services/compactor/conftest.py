"""The database as the compactor has it."""

from collections.abc import AsyncIterator

import pytest

from noetl_core.store.postgres import Pool, open_pool


@pytest.fixture
async def compactor_pool(database: str) -> AsyncIterator[Pool]:
    async with open_pool(database, role="noetl_compactor", size_max=3) as opened:
        yield opened
