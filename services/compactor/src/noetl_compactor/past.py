"""Since when executions are kept, by the slower one of two clocks: the database's and our own.

When an execution began and when it ended was written by other clocks than that of this process,
which may run ahead of them all. Archived too late is no harm, archived too early is.
"""

from noetl_core.domain.retention import kept_from_ms
from noetl_core.store.postgres import Pool, clock_of


async def kept_from(pool: Pool, *, own_ms: int, retention_days: float) -> int:
    """What ended before this moment may leave the database; in milliseconds since 1970."""
    now_ms = min(own_ms, round(await clock_of(pool) * 1000))
    return kept_from_ms(now_ms=now_ms, retention_days=retention_days)
