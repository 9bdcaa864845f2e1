"""What open executions wait for: their rows in the queue, and who lives to take them.

Only reads. A row of noetl.command is read by its primary key, the processes are few.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from noetl_core.domain.ids import ExecutionId
from noetl_core.domain.waiting import OpenGroup
from noetl_core.domain.workers import Workers
from noetl_core.store import runtime
from noetl_core.store.postgres import Connection, Pool

if TYPE_CHECKING:
    from asyncpg import Record

ONLINE_SECONDS = 45.0
"""A worker that was heard of so lately may take a command; of one that is heard of seldom, three of
its heartbeats if that is longer (noetl.silence_allowed)."""

_GROUPS = """
SELECT execution_id, step, pool, count(*), max(attempt) AS attempt, requires, situation,
    CASE situation WHEN 'meant' THEN max(target_until) ELSE min(available_at) END AS next_at,
    CASE situation WHEN 'meant' THEN target_worker END AS target
FROM noetl.command
CROSS JOIN LATERAL (SELECT CASE
    WHEN status = 'leased' AND lease_until < now() THEN 'silent'
    WHEN status = 'leased' THEN 'running'
    WHEN status = 'held' THEN 'held'
    WHEN available_at > now() THEN 'delayed'
    WHEN target_worker IS NOT NULL AND target_until > now() THEN 'meant'
    ELSE 'ready'
END) AS stands (situation)
WHERE execution_id = ANY ($1::bigint[])
GROUP BY execution_id, step, pool, requires, situation, target
"""

_OTHERS = """
SELECT runtime->>'type' FROM noetl.runtime
WHERE kind = 'worker_pool' AND status = 'ready'
  AND heartbeat > now() - noetl.silence_allowed(runtime, $1)
"""

# A flag of before its last event is of no meaning any more.
_IDLE = """
SELECT idle.execution_id,
    (SELECT d.reason
     FROM noetl.dead_letter AS d JOIN noetl.execution AS x ON x.execution_id = d.execution_id
     WHERE d.execution_id = idle.execution_id AND d.source = 'reaper'
       AND d.created_at > x.updated_at
     ORDER BY d.dead_letter_id DESC LIMIT 1) AS flag,
    EXISTS (SELECT FROM noetl.execution_shard AS o
            WHERE o.role = 'broker' AND o.leased_until >= now()
              AND o.shard_id = noetl.vnode(idle.execution_id) % s.value::integer) AS has_broker
FROM unnest($1::bigint[]) AS idle (execution_id)
JOIN noetl.setting AS s ON s.name = 'shard_count'
"""


# The row of a command comes with the event that issues it and goes with the one that ends it. So
# one that is open in the state and has no row is lost, if the state is of the last event.
_LOST = """
SELECT x.execution_id, coalesce(c.value ->> 'step', '') AS step, count(*)
FROM noetl.execution AS x
CROSS JOIN LATERAL jsonb_each(
    CASE jsonb_typeof(x.state -> 'commands') WHEN 'object' THEN x.state -> 'commands' END
) AS c
WHERE x.execution_id = ANY ($1::bigint[])
  AND (x.waits_for IS NULL OR x.waits_for[1] <> x.last_projected_event_id)
  AND c.value -> 'parked' IS NULL
  AND NOT EXISTS (
      SELECT FROM noetl.command AS q
      WHERE q.execution_id = x.execution_id AND q.command_id = c.key
  )
  AND NOT EXISTS (
      SELECT FROM noetl.event AS e
      WHERE e.execution_id = x.execution_id AND e.event_id > x.last_projected_event_id
  )
GROUP BY x.execution_id, 2
"""


class Situation(NamedTuple):
    """`has_broker` is looked at where no command is open: it can only be the broker's turn."""

    groups: list[OpenGroup]
    flag: str | None = None
    has_broker: bool = True


async def situations(
    conn: Connection | Pool, execution_ids: Sequence[ExecutionId]
) -> dict[ExecutionId, Situation]:
    """What is open of each of these executions, and whether the reaper has flagged it."""
    if not execution_ids:
        return {}
    rows = await conn.fetch(_GROUPS, execution_ids)
    is_ready = any(row["situation"] in ("ready", "meant") for row in rows)
    online = await _online(conn) if is_ready else _Online(Workers(), frozenset())
    found = {execution_id: Situation([]) for execution_id in execution_ids}
    for row in rows:
        found[row["execution_id"]].groups.append(_group(row, online))
    idle = [execution_id for execution_id, one in found.items() if not one.groups]
    for row in await conn.fetch(_IDLE, idle) if idle else []:
        found[row["execution_id"]] = Situation([], row["flag"], row["has_broker"])
    for row in await conn.fetch(_LOST, idle) if idle else []:
        lost = OpenGroup(step=row["step"], pool="", commands=row["count"], situation="lost")
        found[row["execution_id"]].groups.append(lost)
    return found


class _Online(NamedTuple):
    workers: Workers
    others: frozenset[str]
    """Pools that workers of other systems serve. Those lease nothing here, and what they have is
    not known."""

    def waits_for(self, pool: str, requires: Iterable[str]) -> str:
        """The situation of a command that anyone may take."""
        if self.workers.able(pool, frozenset(requires)):
            return "ready"
        return "elsewhere" if pool in self.others else "alone"


async def _online(conn: Connection | Pool) -> _Online:
    workers = Workers(await runtime.live_workers(conn, live_seconds=ONLINE_SECONDS))
    others = await conn.fetch(_OTHERS, ONLINE_SECONDS)
    return _Online(workers, frozenset(row[0] for row in others))


def _group(row: "Record", online: _Online) -> OpenGroup:
    situation, requires = row["situation"], tuple(row["requires"] or ())
    if situation == "ready":
        situation = online.waits_for(row["pool"], requires)
    return OpenGroup(
        step=row["step"],
        pool=row["pool"],
        commands=row["count"],
        situation=situation,
        requires=requires,
        attempt=row["attempt"],
        next_at=row["next_at"],
        target=row["target"],
        is_target_online=row["target"] is None or online.workers.has(row["target"]),
    )


class OpenCommandRow(NamedTuple):
    command_id: str
    step: str
    status: str
    pool: str
    attempt: int
    worker_id: str | None
    silent_seconds: float | None
    available_at: datetime
    lease_until: datetime | None


# Of what a worker that was started anew has given up, nobody was heard of since then at least.
_COMMANDS = """
SELECT command_id, step, status, pool, attempt, worker_id,
       extract(epoch FROM now() - coalesce(last_heartbeat, lease_until))::double precision,
       available_at, lease_until
FROM noetl.command WHERE execution_id = $1
ORDER BY status = 'leased' DESC, available_at, command_id
LIMIT $2
"""


async def open_commands(
    conn: Connection | Pool, execution_id: ExecutionId, *, limit: int
) -> list[OpenCommandRow]:
    """Those that a worker holds first."""
    rows = await conn.fetch(_COMMANDS, execution_id, limit)
    return [OpenCommandRow(*row) for row in rows]


class Surroundings(NamedTuple):
    """What is around an execution: its shard, its mail, its timers, what was parked of it."""

    shard_id: int
    broker: str | None
    projection: str | None
    lag_ms: int
    """The age of the shard's first event that the status does not show."""
    messages: int
    oldest_message_seconds: float | None
    timer: str | None
    due_at: datetime | None
    dead_letters: list[int]


_SURROUNDINGS = """
WITH own AS (
    SELECT noetl.vnode($1) % value::integer AS shard_id
    FROM noetl.setting WHERE name = 'shard_count'
), behind AS (
    SELECT extract(epoch FROM now() - tail.created_at) * 1000 AS ms
    FROM own
    LEFT JOIN noetl.projection_checkpoint AS p USING (shard_id)
    CROSS JOIN LATERAL (
        SELECT created_at FROM noetl.event
        WHERE shard_id = own.shard_id AND event_id > coalesce(p.last_projected_event_id, 0)
        ORDER BY event_id
        LIMIT 1
    ) AS tail
), mail AS (
    SELECT count(*) AS messages,
           extract(epoch FROM now() - min(created_at))::double precision AS oldest
    FROM noetl.inbox WHERE execution_id = $1
), next_timer AS (
    SELECT timer, due_at FROM noetl.timer WHERE execution_id = $1 ORDER BY due_at LIMIT 1
)
SELECT
    own.shard_id,
    (SELECT owner_instance FROM noetl.execution_shard AS s
     WHERE s.role = 'broker' AND s.shard_id = own.shard_id AND s.leased_until >= now()),
    (SELECT owner_instance FROM noetl.execution_shard AS s
     WHERE s.role = 'projection' AND s.shard_id = own.shard_id AND s.leased_until >= now()),
    greatest(0, (SELECT ms FROM behind))::bigint,
    mail.messages, mail.oldest,
    (SELECT timer FROM next_timer), (SELECT due_at FROM next_timer),
    ARRAY (SELECT dead_letter_id FROM noetl.dead_letter WHERE execution_id = $1
           ORDER BY dead_letter_id DESC LIMIT 5)
FROM own, mail
"""


async def surroundings(conn: Connection | Pool, execution_id: ExecutionId) -> Surroundings:
    row = await conn.fetchrow(_SURROUNDINGS, execution_id)
    assert row is not None, "a database has a shard count"
    return Surroundings(*row)


class LastEvent(NamedTuple):
    event_type: str
    node_name: str | None
    created_at: datetime


# That an epoch was closed over it is nothing that happened to it.
_LAST_EVENT = """
SELECT event_type, node_name, created_at FROM noetl.event
WHERE execution_id = $1 AND event_type <> 'checkpoint.committed'
ORDER BY event_id DESC LIMIT 1
"""


async def last_event(conn: Connection | Pool, execution_id: ExecutionId) -> LastEvent | None:
    row = await conn.fetchrow(_LAST_EVENT, execution_id)
    return None if row is None else LastEvent(*row)


class LastError(NamedTuple):
    event_type: str
    node_name: str | None
    attempt: int | None
    error: str
    created_at: datetime


# Only near the end of the log: an error of long ago is not what it waits for.
_LAST_ERROR = """
SELECT event_type, node_name, attempt, error, created_at FROM (
    SELECT event_id, event_type, node_name, attempt, error, created_at FROM noetl.event
    WHERE execution_id = $1 ORDER BY event_id DESC LIMIT 1000
) AS latest
WHERE error IS NOT NULL
ORDER BY event_id DESC LIMIT 1
"""


async def last_error(conn: Connection | Pool, execution_id: ExecutionId) -> LastError | None:
    row = await conn.fetchrow(_LAST_ERROR, execution_id)
    return None if row is None else LastError(*row)
