"""Executions that should move and do not: nothing of theirs is under way anywhere.

The reaper tells the broker, which looks at the log and decides. Where that leads to nothing either,
the execution is flagged: a row of noetl.dead_letter, which goes when the execution moves again.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from noetl_core.domain.ids import CommandId, ExecutionId, ShardId
from noetl_core.domain.timers import wait_timer
from noetl_core.store.command import CommandKey
from noetl_core.store.postgres import Connection, Pool

# A message that waits in the inbox of the shard may be what will move it, and so will the end of a
# wait. A timeout will not: it would only say much later that nothing moves. What is paused should
# not move, so it does not count. An execution all of whose commands are parked waits for somebody
# or for a child; only where the child has ended, or is nowhere, has something been lost.
#
# Very many may wait for somebody, so that is seen in the small column `waits_for`; the state is
# read of those that remain. It is believed only if it is of the last event (migration 0011).
#
# A state may be anything, until the projection finds out that it is broken: that stops nobody.
#
# `quiet` stands by itself: beside what the planner believes it to cost, reading all timers for each
# of its rows would be no difference to it.
_IDLE = """
WITH quiet AS MATERIALIZED (
    SELECT x.execution_id, x.shard_id, x.updated_at, x.waiting_on
    FROM noetl.execution AS x
    WHERE x.status IN ('PENDING', 'RUNNING')
      AND x.updated_at < now() - make_interval(secs => $1)
      AND NOT coalesce(
          x.waits_for[1] = x.last_projected_event_id
          AND (cardinality(x.waits_for) = 1 OR NOT EXISTS (
              SELECT FROM unnest(x.waits_for[2:]) AS c (child)
              WHERE NOT EXISTS (
                  SELECT FROM noetl.execution AS child WHERE child.execution_id = c.child
                    AND child.status IN ('PENDING', 'RUNNING', 'PAUSED')
              ) AND NOT EXISTS (
                  SELECT FROM noetl.inbox AS i WHERE i.execution_id = c.child
              )
          )), false
      )
), idle AS MATERIALIZED (
    SELECT x.execution_id, x.shard_id, x.updated_at, x.waiting_on
    FROM quiet AS x
    JOIN noetl.setting AS s ON s.name = 'shard_count'
    WHERE NOT EXISTS (SELECT FROM noetl.command AS c WHERE c.execution_id = x.execution_id)
      AND NOT EXISTS (
          SELECT FROM noetl.inbox AS i
          WHERE i.shard_id = noetl.vnode(x.execution_id) % s.value::integer
      )
      AND NOT EXISTS (
          SELECT FROM noetl.timer AS t
          WHERE t.execution_id = x.execution_id AND starts_with(t.timer, $2)
      )
), waits AS (
    SELECT idle.execution_id,
           bool_and(coalesce(parked.kind <> 'playbook' OR child.status IN
               ('PENDING', 'RUNNING', 'PAUSED') OR letter.execution_id IS NOT NULL, false)) AS alive
    FROM idle
    JOIN noetl.execution AS x ON x.execution_id = idle.execution_id
    CROSS JOIN LATERAL jsonb_each(
        CASE jsonb_typeof(x.state -> 'commands') WHEN 'object' THEN x.state -> 'commands' END
    ) AS c
    CROSS JOIN LATERAL (
        SELECT c.value #>> '{parked,kind}' AS kind,
               CASE WHEN c.value #>> '{parked,child}' ~ '^([0-9]{1,18}|[1-8][0-9]{18})$'
                    THEN (c.value #>> '{parked,child}')::bigint END AS child
    ) AS parked
    LEFT JOIN noetl.execution AS child ON child.execution_id = parked.child
    LEFT JOIN LATERAL (
        SELECT execution_id FROM noetl.inbox AS i WHERE i.execution_id = parked.child LIMIT 1
    ) AS letter ON true
    GROUP BY idle.execution_id
)
SELECT idle.execution_id, idle.shard_id, idle.updated_at, idle.waiting_on
FROM idle LEFT JOIN waits USING (execution_id)
WHERE NOT coalesce(waits.alive, false)
"""

# As with leases (command.py), no shard hides the executions of another.
_OLDEST_IDLE = f"""
SELECT execution_id FROM (
    SELECT found.execution_id, found.updated_at, s.value::integer AS shard_count,
           row_number() OVER (
               PARTITION BY noetl.vnode(found.execution_id) % s.value::integer
               ORDER BY found.updated_at, found.execution_id
           ) AS place
    FROM ({_IDLE}) AS found
    JOIN noetl.setting AS s ON s.name = 'shard_count'
) AS placed
WHERE place <= greatest(1, $3::integer / shard_count)
ORDER BY place, updated_at
LIMIT $3
"""  # noqa: S608 - a constant

_WAITS = wait_timer(CommandId(""))


async def idle_executions(
    conn: Connection | Pool, *, idle_seconds: float, limit: int
) -> list[ExecutionId]:
    """Running executions without a command, a wait, a message or an event for `idle_seconds`: of
    each shard the oldest, up to its share of the limit."""
    rows = await conn.fetch(_OLDEST_IDLE, idle_seconds, _WAITS, limit)
    return [ExecutionId(row["execution_id"]) for row in rows]


# By the key, page by page: however many executions there are, a look reads so many. The projection
# may be behind, so a command that is not in the queue may have ended: it is lost if it is still
# open at the next look.
_LOST = """
WITH page AS MATERIALIZED (
    SELECT execution_id, state FROM noetl.execution
    WHERE status IN ('PENDING', 'RUNNING') AND execution_id > $1
    ORDER BY execution_id
    LIMIT $2
), lost AS MATERIALIZED (
    SELECT page.execution_id, c.key AS command_id
    FROM page
    CROSS JOIN LATERAL jsonb_each(
        CASE jsonb_typeof(page.state -> 'commands') WHEN 'object' THEN page.state -> 'commands' END
    ) AS c
    WHERE c.value -> 'parked' IS NULL
      AND NOT EXISTS (
          SELECT FROM noetl.command AS q
          WHERE q.execution_id = page.execution_id AND q.command_id = c.key
      )
)
SELECT whole.upto, lost.execution_id, lost.command_id
FROM (SELECT CASE WHEN count(*) >= $2 THEN max(execution_id) END AS upto FROM page) AS whole
LEFT JOIN lost ON true
LIMIT $3
"""


class Unqueued(NamedTuple):
    commands: list[CommandKey]
    """Open in the state of their execution, and not in the queue."""
    upto: ExecutionId | None
    """Where the next page begins; None when this was the last one."""


async def unqueued(
    conn: Connection | Pool, after: ExecutionId, *, executions_max: int, commands_max: int
) -> Unqueued:
    rows = await conn.fetch(_LOST, after, executions_max, commands_max)
    upto = rows[0]["upto"]
    return Unqueued(
        [(ExecutionId(r[1]), CommandId(r[2])) for r in rows if r[1] is not None],
        None if upto is None else ExecutionId(upto),
    )


class Stuck(NamedTuple):
    execution_id: ExecutionId
    shard_id: ShardId
    updated_at: datetime
    waiting_on: str | None


# While nobody owns its shard it is not stuck, it only has to wait. A flag is set once.
_STUCK = f"""{_IDLE}
  AND 2 = (
      SELECT count(*) FROM noetl.execution_shard AS o
      JOIN noetl.setting AS s ON s.name = 'shard_count'
      WHERE o.shard_id = noetl.vnode(idle.execution_id) % s.value::integer
        AND o.role IN ('broker', 'projection') AND o.leased_until >= now()
  )
  AND NOT EXISTS (
      SELECT FROM noetl.dead_letter AS d
      WHERE d.execution_id = idle.execution_id AND d.source = 'reaper'
  )
ORDER BY idle.updated_at
LIMIT $3
"""  # noqa: S608 - a constant


async def stuck_executions(
    conn: Connection | Pool, *, stuck_seconds: float, limit: int
) -> list[Stuck]:
    """The same, idle for so long that the broker has been told in vain; without a flag yet."""
    return [Stuck(*row) for row in await conn.fetch(_STUCK, stuck_seconds, _WAITS, limit)]


_FLAG = """
INSERT INTO noetl.dead_letter (shard_id, execution_id, source, body, reason)
VALUES ($1, $2, 'reaper', $3, $4)
"""


async def flag(conn: Connection | Pool, one: Stuck, *, body: bytes, reason: str) -> None:
    """`body` is what a retry of the dead letter tells the broker."""
    await conn.execute(_FLAG, one.shard_id, one.execution_id, body, reason)


_UNFLAG = """
DELETE FROM noetl.dead_letter AS d
USING noetl.execution AS x
WHERE d.source = 'reaper' AND x.execution_id = d.execution_id
  AND (x.updated_at > d.created_at OR x.status NOT IN ('PENDING', 'RUNNING'))
RETURNING d.execution_id
"""


async def unflag_moved(conn: Connection | Pool) -> list[ExecutionId]:
    """Those that have moved since, or need not any more."""
    return [ExecutionId(row[0]) for row in await conn.fetch(_UNFLAG)]


_COUNTS = "SELECT source, count(*) FROM noetl.dead_letter GROUP BY source"


async def dead_letter_counts(conn: Connection | Pool) -> Mapping[str, int]:
    """By source; that of the reaper are the executions that are flagged."""
    return {row[0]: row[1] for row in await conn.fetch(_COUNTS)}
