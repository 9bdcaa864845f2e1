"""The status rows made anew from the log, while the system runs: nobody sees one missing."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import asyncpg

from noetl_cli.failure import EXIT_USAGE, CommandFailed
from noetl_core.domain.ids import ExecutionId
from noetl_core.store import execution_projection, refold
from noetl_core.store.postgres import Pool, open_pool

PAGE_SIZE = 200
_LAST = ExecutionId(2**63 - 1)

Tell = Callable[[int, int], None]


class Rebuilt(NamedTuple):
    """`folded` executions were looked at, and the rows of `written` were not as they should be."""

    folded: int = 0
    written: int = 0


async def rebuild_one(dsn: str, execution_id: ExecutionId) -> Rebuilt:
    async with _database(dsn) as pool:
        rows = await execution_projection.standing(pool, [execution_id])
        missing = await execution_projection.missing_between(
            pool, after=ExecutionId(execution_id - 1), upto=execution_id
        )
        if not rows and not missing:
            raise CommandFailed(f"there is no execution {execution_id}", exit_code=EXIT_USAGE)
        return await _rebuild(pool, [execution_id])


async def rebuild_all(dsn: str, tell: Tell) -> Rebuilt:
    """`tell` hears after every page how many were folded and written so far."""
    total = Rebuilt()
    async with _database(dsn) as pool:
        async for page in _pages(pool):
            done = await _rebuild(pool, page)
            total = Rebuilt(total.folded + done.folded, total.written + done.written)
            tell(*total)
    return total


async def _pages(pool: Pool) -> AsyncIterator[Sequence[ExecutionId]]:
    after = ExecutionId(0)
    while after < _LAST:
        rows = await execution_projection.rows_after(pool, after, limit=PAGE_SIZE)
        upto = rows[-1] if len(rows) == PAGE_SIZE else _LAST
        missing = await execution_projection.missing_between(pool, after=after, upto=upto)
        if rows or missing:
            yield sorted({*rows, *missing})
        after = upto


async def _rebuild(pool: Pool, executions: Sequence[ExecutionId]) -> Rebuilt:
    found = [d for one in executions if (d := await refold.compare(pool, one)) is not None]
    await refold.heal(pool, found)
    return Rebuilt(len(executions), len(found))


@asynccontextmanager
async def _database(dsn: str) -> AsyncIterator[Pool]:
    try:
        async with open_pool(dsn, role="noetl_projection", size_max=2) as pool:
            yield pool
    except (OSError, asyncpg.PostgresError, ValueError) as error:
        raise CommandFailed(f"the rebuild stopped: {error}. It is safe to run it again.") from error
