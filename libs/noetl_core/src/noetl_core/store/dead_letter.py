"""noetl.dead_letter: what could not be processed, until somebody retries or discards it.

Who writes it: the broker and the projection, in the commit that goes on without it (batch.py,
execution_projection.py), and the reaper, which flags executions that nothing can move (stuck.py).
"""

from datetime import datetime
from typing import NamedTuple

from noetl_core.domain.ids import ExecutionId
from noetl_core.store.postgres import Connection, Pool


class DeadLetter(NamedTuple):
    dead_letter_id: int
    shard_id: int | None
    execution_id: ExecutionId | None
    source: str
    reason: str
    size: int
    created_at: datetime
    body: bytes = b""


_COLUMNS = """
dead_letter_id, shard_id, execution_id, source, reason, octet_length(body), created_at
"""

_PAGE = f"""
SELECT {_COLUMNS} FROM noetl.dead_letter
WHERE dead_letter_id < $1
  AND ($2::bigint IS NULL OR execution_id = $2) AND ($3::text IS NULL OR source = $3)
ORDER BY dead_letter_id DESC
LIMIT $4
"""  # noqa: S608 - a constant


async def page(
    conn: Connection | Pool,
    *,
    before: int,
    execution_id: ExecutionId | None = None,
    source: str | None = None,
    limit: int,
) -> list[DeadLetter]:
    """From the newest to the oldest, without their bodies."""
    rows = await conn.fetch(_PAGE, before, execution_id, source, limit)
    return [DeadLetter(*row) for row in rows]


_READ = f"SELECT {_COLUMNS}, body FROM noetl.dead_letter WHERE dead_letter_id = $1"  # noqa: S608


async def read(conn: Connection | Pool, dead_letter_id: int) -> DeadLetter | None:
    row = await conn.fetchrow(_READ, dead_letter_id)
    return None if row is None else DeadLetter(*row)


_REMOVE = f"DELETE FROM noetl.dead_letter WHERE dead_letter_id = $1 RETURNING {_COLUMNS}, body"  # noqa: S608


async def remove(conn: Connection | Pool, dead_letter_id: int) -> DeadLetter | None:
    """None when somebody else was first."""
    row = await conn.fetchrow(_REMOVE, dead_letter_id)
    return None if row is None else DeadLetter(*row)
