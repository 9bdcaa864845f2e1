"""Postgres away: what runs waits for it. If our lease is gone by then, so is the command."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from noetl_core.process.resilience import backoff_seconds
from noetl_core.store.postgres import is_postgres_away

T = TypeVar("T")


async def patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask again until Postgres answers; asking twice must be as good as once."""
    failures = 0
    while True:
        try:
            return await ask()
        except Exception as error:
            if not is_postgres_away(error):
                raise
            failures += 1
            await asyncio.sleep(backoff_seconds(failures))
