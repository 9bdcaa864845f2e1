"""Executions that should move and do not: nothing of theirs is under way anywhere.

A question only. The reaper tells the broker, which looks at the log and decides.
"""

from collections.abc import Iterable

from noetl_core.domain.ids import ExecutionId
from noetl_core.store.postgres import Connection, Pool

# A message that waits in the inbox of the shard may be what will move it.
_IDLE = """
SELECT x.execution_id
FROM noetl.execution AS x
JOIN noetl.setting AS s ON s.name = 'shard_count'
WHERE x.status IN ('PENDING', 'RUNNING') AND x.updated_at < now() - make_interval(secs => $1)
  AND NOT EXISTS (SELECT FROM noetl.command AS c WHERE c.execution_id = x.execution_id)
  AND NOT EXISTS (
      SELECT FROM noetl.inbox AS i
      WHERE i.shard_id = noetl.vnode(x.execution_id) % s.value::integer
  )
  AND NOT EXISTS (
      SELECT FROM unnest($2::bigint[]) AS told (execution_id)
      WHERE told.execution_id = x.execution_id
  )
ORDER BY x.updated_at
LIMIT $3
"""


async def idle_executions(
    conn: Connection | Pool,
    *,
    idle_seconds: float,
    but_not: Iterable[ExecutionId] = (),
    limit: int,
) -> list[ExecutionId]:
    """Open executions without a command, a message or an event for `idle_seconds`."""
    rows = await conn.fetch(_IDLE, idle_seconds, list(but_not), limit)
    return [ExecutionId(row["execution_id"]) for row in rows]
