from collections.abc import AsyncIterator

import pytest

from noetl_core.store.postgres import Pool, open_pool


@pytest.fixture
async def projection_pool(database: str) -> AsyncIterator[Pool]:
    """Under the role of the service, so that every test proves its grants too."""
    async with open_pool(database, role="noetl_projection", size_max=4) as opened:
        yield opened
