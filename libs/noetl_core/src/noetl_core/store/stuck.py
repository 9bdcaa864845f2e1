"""Executions that should move and do not: nothing of theirs is under way anywhere.

A question only. The reaper tells the broker, which looks at the log and decides.
"""

from collections.abc import Iterable

from noetl_core.domain.ids import CommandId, ExecutionId
from noetl_core.domain.timers import wait_timer
from noetl_core.store.postgres import Connection, Pool

# A message that waits in the inbox of the shard may be what will move it, and so will the end of a
# wait. A timeout will not: it would only say much later that nothing moves. What is paused should
# not move, so it does not count.
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
      SELECT FROM noetl.timer AS t
      WHERE t.execution_id = x.execution_id AND starts_with(t.timer, $4)
  )
  AND NOT EXISTS (
      SELECT FROM unnest($2::bigint[]) AS told (execution_id)
      WHERE told.execution_id = x.execution_id
  )
ORDER BY x.updated_at
LIMIT $3
"""

_WAITS = wait_timer(CommandId(""))


async def idle_executions(
    conn: Connection | Pool,
    *,
    idle_seconds: float,
    but_not: Iterable[ExecutionId] = (),
    limit: int,
) -> list[ExecutionId]:
    """Running executions without a command, a wait, a message or an event for `idle_seconds`."""
    rows = await conn.fetch(_IDLE, idle_seconds, list(but_not), limit, _WAITS)
    return [ExecutionId(row["execution_id"]) for row in rows]
