"""noetl.timer: what must happen at a moment. The broker sets a row and removes it in the commit
that acts on it; the reaper only sees which are due.
"""

from datetime import datetime
from typing import NamedTuple

from noetl_core.domain.ids import ExecutionId
from noetl_core.store.postgres import Connection, Pool


class DueTimer(NamedTuple):
    """`due_at` tells a timer from a later one of the same name."""

    execution_id: ExecutionId
    timer: str
    due_at: datetime


# As with leases (command.py), no shard hides the timers of another.
_DUE = """
SELECT execution_id, timer, due_at
FROM (
    SELECT t.execution_id, t.timer, t.due_at, s.value::integer AS shard_count,
           row_number() OVER (
               PARTITION BY noetl.vnode(t.execution_id) % s.value::integer
               ORDER BY t.due_at, t.execution_id, t.timer
           ) AS place
    FROM noetl.timer AS t
    JOIN noetl.setting AS s ON s.name = 'shard_count'
    WHERE t.due_at <= now()
) AS due
WHERE place <= greatest(1, $1::integer / shard_count)
ORDER BY place, due_at
LIMIT $1
"""


async def due(conn: Connection | Pool, *, limit: int) -> list[DueTimer]:
    """Timers that have run out: of each shard the oldest, up to its share of the limit."""
    return [DueTimer(*row) for row in await conn.fetch(_DUE, limit)]


_NEXT_DUE = """
SELECT extract(epoch FROM min(due_at) - now())::double precision FROM noetl.timer
WHERE due_at > now() AND due_at <= now() + make_interval(secs => $1)
"""


async def next_due(conn: Connection | Pool, *, within_seconds: float) -> float | None:
    """Seconds until the next timer runs out, if one does within that time."""
    seconds: float | None = await conn.fetchval(_NEXT_DUE, within_seconds)
    return seconds
