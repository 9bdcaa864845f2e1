"""Postgres away: what runs waits for it. If our lease is gone by then, so is the command.

The store of results away: what runs waits for a while, and then says that it cannot be read.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from noetl_core.blob import ReferenceNotAvailableError
from noetl_core.blob.away import StoreAwayError, StoreRefusedError
from noetl_core.domain.ids import ExecutionId
from noetl_core.process.resilience import backoff_seconds
from noetl_core.store.postgres import is_postgres_away

STORE_TRIES_MAX = 8
"""With the waits between them about 11 s, and as long as each of them takes."""

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


async def read_patiently(execution_id: ExecutionId, ask: Callable[[], Awaitable[T]]) -> T:
    """The same for what is in the store of results. Raises ReferenceNotAvailableError."""
    failures = 0
    while True:
        try:
            return await patiently(ask)
        except StoreAwayError as error:
            failures += 1
            if failures == STORE_TRIES_MAX or isinstance(error, StoreRefusedError):
                raise ReferenceNotAvailableError(str(error), execution_id=execution_id) from error
            await asyncio.sleep(backoff_seconds(failures))
