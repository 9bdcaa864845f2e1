"""noetl.execution as the projection writes it. Clients read it in execution.py.

A batch is one statement: it proves the leases, writes the rows, parks what could not be read and
moves the watermarks. So a row and the watermark that covers it are there together or not at all.

A row holds nothing but what the log says: its times are the events' times, and an update never goes
back to an earlier event. Truncate, replay, and the same bytes come back.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from noetl_core.domain.ids import EventId, ExecutionId, ShardId
from noetl_core.domain.progress import progress, waiting_on, waits_for
from noetl_core.domain.state import ExecutionState
from noetl_core.store.postgres import Connection, Pool


class Projected(msgspec.Struct, kw_only=True):
    """One row of noetl.execution, with the state it is a picture of."""

    state: ExecutionState
    shard_id: ShardId
    started_at: datetime
    updated_at: datetime
    last_event_type: str
    last_event_id: EventId
    last_node_name: str | None = None
    path: str = ""
    version: int = 0
    parent_execution_id: ExecutionId | None = None
    ended_at: datetime | None = None
    state_bytes: int = 0
    """As JSON, when it was last read or written."""


class Parked(NamedTuple):
    """An event that could not be folded, or a row that could not be read nor made anew: it goes to
    noetl.dead_letter, the shard goes on."""

    shard_id: ShardId
    execution_id: ExecutionId
    body: bytes
    reason: str


class Reached(NamedTuple):
    """The newest event of a batch, by shard: the next watermark."""

    event_id: EventId
    created_at: datetime


_LOAD = """
SELECT execution_id, shard_id, path, version, state, last_event_type, last_node_name,
       last_projected_event_id, parent_execution_id, started_at, updated_at, ended_at
FROM noetl.execution
WHERE execution_id = ANY ($1::bigint[])
"""

_decode_state = msgspec.json.Decoder(ExecutionState).decode


class Unreadable(NamedTuple):
    """A row whose state is none."""

    state: bytes
    reason: str


class Loaded(NamedTuple):
    rows: dict[ExecutionId, Projected]
    unreadable: dict[ExecutionId, Unreadable]


async def load(conn: Connection, execution_ids: Iterable[ExecutionId]) -> Loaded:
    """What was projected of these executions; one that has no row yet is left out."""
    loaded = Loaded({}, {})
    for row in await conn.fetch(_LOAD, list(execution_ids)):
        execution_id = ExecutionId(row["execution_id"])
        try:
            loaded.rows[execution_id] = _projected(row)
        except Exception as error:  # noqa: BLE001 - one bad row, whatever it is, stops no other
            reason = f"{type(error).__name__}: {error}"
            loaded.unreadable[execution_id] = Unreadable(row["state"].encode(), reason)
    return loaded


def _projected(row: Any) -> Projected:
    return Projected(
        state=_decode_state(row["state"]),
        shard_id=ShardId(row["shard_id"]),
        started_at=row["started_at"],
        updated_at=row["updated_at"],
        last_event_type=row["last_event_type"],
        last_event_id=EventId(row["last_projected_event_id"]),
        last_node_name=row["last_node_name"],
        path=row["path"],
        version=row["version"],
        parent_execution_id=row["parent_execution_id"],
        ended_at=row["ended_at"],
        state_bytes=len(row["state"]),
    )


# Every write joins `fence`, so a shard that has another owner by now is left alone while the others
# go on. FOR SHARE keeps a new owner from claiming until this commit is over; the order of the locks
# is that of every other statement on these rows. What the log can be asked for again (the lag, the
# time of the turn) is all that comes from the clock, and it stays out of noetl.execution.
_COMMIT = """
WITH fence AS (
    SELECT s.shard_id
    FROM noetl.execution_shard AS s
    JOIN unnest($1::integer[], $2::bigint[]) AS held (shard_id, epoch)
        ON s.shard_id = held.shard_id AND s.epoch = held.epoch
    WHERE s.role = 'projection'
    ORDER BY s.shard_id
    FOR SHARE OF s
),
written AS (
    INSERT INTO noetl.execution AS x (
        execution_id, catalog_id, path, version, shard_id, status, state, ctx, progress, waiting_on,
        last_event_type, last_node_name, last_projected_event_id, parent_execution_id, error,
        started_at, updated_at, ended_at, waits_for
    )
    SELECT
        u.execution_id, u.catalog_id, u.path, u.version, u.shard_id, u.status, u.state,
        coalesce(u.state -> 'ctx', '{}'), u.progress, u.waiting_on, u.last_event_type,
        u.last_node_name, u.last_event_id, u.parent_execution_id, u.state -> 'error',
        u.started_at, u.updated_at, u.ended_at, u.waits_for::bigint[]
    FROM unnest(
        $3::bigint[], $4::bigint[], $5::text[], $6::integer[], $7::integer[], $8::text[],
        $9::jsonb[], $10::jsonb[], $11::text[], $12::text[], $13::text[], $14::bigint[],
        $15::bigint[], $16::timestamptz[], $17::timestamptz[], $18::timestamptz[], $19::text[]
    ) AS u (
        execution_id, catalog_id, path, version, shard_id, status, state, progress, waiting_on,
        last_event_type, last_node_name, last_event_id, parent_execution_id, started_at, updated_at,
        ended_at, waits_for
    )
    JOIN fence ON fence.shard_id = u.shard_id
    ON CONFLICT (execution_id) DO UPDATE SET
        catalog_id = excluded.catalog_id,
        path = excluded.path,
        version = excluded.version,
        shard_id = excluded.shard_id,
        status = excluded.status,
        state = excluded.state,
        ctx = excluded.ctx,
        progress = excluded.progress,
        waiting_on = excluded.waiting_on,
        last_event_type = excluded.last_event_type,
        last_node_name = excluded.last_node_name,
        last_projected_event_id = excluded.last_projected_event_id,
        parent_execution_id = excluded.parent_execution_id,
        error = excluded.error,
        started_at = excluded.started_at,
        updated_at = excluded.updated_at,
        ended_at = excluded.ended_at,
        waits_for = excluded.waits_for
    WHERE excluded.last_projected_event_id > x.last_projected_event_id
),
parked AS (
    -- A replay meets the same bad event again: it is parked once.
    INSERT INTO noetl.dead_letter (shard_id, execution_id, source, body, reason)
    SELECT u.shard_id, u.execution_id, 'projection', u.body, u.reason
    FROM unnest($20::integer[], $21::bigint[], $22::bytea[], $23::text[])
        AS u (shard_id, execution_id, body, reason)
    JOIN fence ON fence.shard_id = u.shard_id
    WHERE NOT EXISTS (
        SELECT FROM noetl.dead_letter AS d
        WHERE d.execution_id = u.execution_id AND d.source = 'projection' AND d.body = u.body
    )
),
moved AS (
    INSERT INTO noetl.projection_checkpoint AS c (
        shard_id, last_projected_event_id, last_projected_at, lag_ms
    )
    SELECT
        u.shard_id, u.event_id, clock_timestamp(),
        -- A replay of last month is further behind than an integer of milliseconds can say, and
        -- after the clock of the database was put back an event is of the future.
        greatest(0, least(
            extract(epoch FROM clock_timestamp() - u.created_at) * 1000, 2147483647
        ))::integer
    FROM unnest($24::integer[], $25::bigint[], $26::timestamptz[])
        AS u (shard_id, event_id, created_at)
    JOIN fence ON fence.shard_id = u.shard_id
    ON CONFLICT (shard_id) DO UPDATE SET
        last_projected_event_id = excluded.last_projected_event_id,
        last_projected_at = excluded.last_projected_at,
        lag_ms = excluded.lag_ms
    WHERE excluded.last_projected_event_id > c.last_projected_event_id
    RETURNING c.shard_id, c.lag_ms
)
SELECT fence.shard_id, moved.lag_ms FROM fence LEFT JOIN moved USING (shard_id)
"""


async def commit(
    conn: Connection,
    fences: Mapping[ShardId, int],
    *,
    changed: Sequence[Projected],
    parked: Sequence[Parked],
    reached: Mapping[ShardId, Reached],
) -> dict[ShardId, int]:
    """Write a batch. Returns the shards that are still ours, with their lag in milliseconds."""
    rows = await conn.fetch(
        _COMMIT,
        list(fences),
        list(fences.values()),
        *_columns([_row(one) for one in changed], _WIDTH),
        *_columns(parked, 4),
        list(reached),
        *_columns(list(reached.values()), 2),
    )
    return {ShardId(row["shard_id"]): row["lag_ms"] or 0 for row in rows}


_encode = msgspec.json.Encoder().encode


def _row(one: Projected) -> tuple[object, ...]:
    state = one.state
    encoded = _encode(state)
    one.state_bytes = len(encoded)
    return (
        state.execution_id,
        state.catalog_id,
        one.path,
        one.version,
        one.shard_id,
        state.status,
        encoded.decode(),
        _encode(progress(state)).decode(),
        waiting_on(state),
        one.last_event_type,
        one.last_node_name,
        one.last_event_id,
        one.parent_execution_id,
        one.started_at,
        one.updated_at,
        one.ended_at,
        _array(waits_for(state), one.last_event_id),
    )


_WIDTH = 17


def _array(children: Sequence[ExecutionId] | None, event_id: EventId) -> str | None:
    """As text: arrays of different lengths make no array of arrays."""
    return None if children is None else f"{{{','.join(map(str, (event_id, *children)))}}}"


def _columns(rows: Sequence[tuple[object, ...]], width: int) -> list[tuple[object, ...]]:
    return list(zip(*rows, strict=True)) if rows else [()] * width


class Standing(NamedTuple):
    """A row as it stands, column by column; JSON is decoded."""

    shard_id: ShardId
    last_event_id: EventId
    columns: dict[str, Any]


# The columns of `_row`, in its order, without the shard, which may change while the events stay,
# and without `waits_for`, which says itself what it is of.
_COLUMNS = (
    *("execution_id", "catalog_id", "path", "version", "status", "state", "progress"),
    *("waiting_on", "last_event_type", "last_node_name", "last_projected_event_id"),
    *("parent_execution_id", "started_at", "updated_at", "ended_at"),
)
_JSON = frozenset({"state", "progress", "ctx", "error"})

_STANDING = """
SELECT execution_id, shard_id, catalog_id, path, version, status, state, progress, ctx, error,
       waiting_on, last_event_type, last_node_name, last_projected_event_id, parent_execution_id,
       started_at, updated_at, ended_at
FROM noetl.execution
WHERE execution_id = ANY ($1::bigint[])
"""


async def standing(
    conn: Connection | Pool, execution_ids: Iterable[ExecutionId]
) -> dict[ExecutionId, Standing]:
    """The rows as they are, whatever is in them."""
    rows = await conn.fetch(_STANDING, list(execution_ids))
    return {
        ExecutionId(row["execution_id"]): Standing(
            ShardId(row["shard_id"]),
            EventId(row["last_projected_event_id"]),
            {k: _decoded(k, v) for k, v in row.items() if k != "shard_id"},
        )
        for row in rows
    }


def differing(found: Standing | None, expected: Projected) -> tuple[str, ...]:
    """The columns of a row that are not as they should be."""
    wanted = _expected(expected)
    if found is None:
        return tuple(wanted)
    return tuple(name for name, value in wanted.items() if found.columns[name] != value)


def _expected(one: Projected) -> dict[str, Any]:
    values = [value for place, value in enumerate(_row(one)[:-1]) if place != _SHARD_PLACE]
    wanted = {name: _decoded(name, value) for name, value in zip(_COLUMNS, values, strict=True)}
    wanted["ctx"] = wanted["state"].get("ctx", {})
    wanted["error"] = wanted["state"].get("error")
    return wanted


_SHARD_PLACE = 4
_decode = msgspec.json.Decoder().decode


def _decoded(column: str, value: Any) -> Any:
    return _decode(value) if column in _JSON and value is not None else value


# The lease stays whose it is: the owner finds its new epoch when it renews.
_FENCE = """
UPDATE noetl.execution_shard SET epoch = epoch + 1
WHERE role = 'projection' AND shard_id = ANY (ARRAY(
    SELECT shard_id FROM noetl.execution_shard
    WHERE role = 'projection' AND shard_id = ANY ($1::integer[])
    ORDER BY shard_id
    FOR UPDATE
))
"""


async def fence(conn: Connection, shards: Sequence[ShardId]) -> None:
    """Wait for the batches under way, and make whoever holds the shards drop what it remembers.

    Until the caller's transaction ends, nobody projects these shards.
    """
    await conn.execute(_FENCE, shards)


_REWRITE = """
INSERT INTO noetl.execution AS x (
    execution_id, catalog_id, path, version, shard_id, status, state, ctx, progress, waiting_on,
    last_event_type, last_node_name, last_projected_event_id, parent_execution_id, error,
    started_at, updated_at, ended_at, waits_for
)
SELECT
    $1::bigint, $2::bigint, $3::text, $4::integer, $5::integer, $6::text, $7::jsonb,
    coalesce($7::jsonb -> 'ctx', '{}'), $8::jsonb, $9::text, $10::text, $11::text, $12::bigint,
    $13::bigint, $7::jsonb -> 'error', $14::timestamptz, $15::timestamptz, $16::timestamptz,
    $17::text::bigint[]
ON CONFLICT (execution_id) DO UPDATE SET
    catalog_id = excluded.catalog_id,
    path = excluded.path,
    version = excluded.version,
    shard_id = excluded.shard_id,
    status = excluded.status,
    state = excluded.state,
    ctx = excluded.ctx,
    progress = excluded.progress,
    waiting_on = excluded.waiting_on,
    last_event_type = excluded.last_event_type,
    last_node_name = excluded.last_node_name,
    last_projected_event_id = excluded.last_projected_event_id,
    parent_execution_id = excluded.parent_execution_id,
    error = excluded.error,
    started_at = excluded.started_at,
    updated_at = excluded.updated_at,
    ended_at = excluded.ended_at,
    waits_for = excluded.waits_for
WHERE x.last_projected_event_id = $18
RETURNING execution_id
"""


async def rewrite(conn: Connection, row: Projected, *, seen: EventId | None) -> bool:
    """Write a row in place of the one that stood at `seen`; None if there was none.

    The caller holds the fence of its shards. False when the row has moved nevertheless.
    """
    return await conn.fetchval(_REWRITE, *_row(row), seen) is not None


_PARK_DIFFERENCE = """
INSERT INTO noetl.dead_letter (shard_id, execution_id, source, body, reason)
VALUES ($1, $2, 'projection.differs', $3, $4)
"""


async def park_difference(
    conn: Connection,
    shard: ShardId,
    execution_id: ExecutionId,
    *,
    columns: Sequence[str],
    standing: Standing | None,
) -> None:
    """Keep what stood in a row that is written anew: somebody may want to know how it came."""
    was = None if standing is None else {name: standing.columns[name] for name in columns}
    reason = (
        "the execution had no row"
        if standing is None
        else f"the row was not what its events say, in {', '.join(columns)}"
    )
    await conn.execute(
        _PARK_DIFFERENCE, shard, execution_id, _encode(was), f"{reason}; it was written anew"
    )


_NEWEST = """
SELECT execution_id FROM noetl.execution WHERE shard_id = ANY ($1::integer[])
ORDER BY started_at DESC, execution_id DESC
LIMIT $2
"""
# Step by step through the index of the log, whatever the number of events of each: an execution
# that has no row is found, too. So far that about so many of them lie on these shards.
_LOGGED = """
WITH RECURSIVE logged AS (
    (SELECT execution_id FROM noetl.event WHERE execution_id > $2 ORDER BY execution_id LIMIT 1)
    UNION ALL
    SELECT next.execution_id
    FROM logged
    CROSS JOIN LATERAL (
        SELECT execution_id FROM noetl.event
        WHERE execution_id > logged.execution_id
        ORDER BY execution_id
        LIMIT 1
    ) AS next
), page AS (
    SELECT execution_id FROM logged LIMIT (
        SELECT ceil($3::float * value::integer / cardinality($1::integer[]))::bigint
        FROM noetl.setting WHERE name = 'shard_count'
    )
)
SELECT page.execution_id,
       noetl.vnode(page.execution_id) % s.value::integer = ANY ($1::integer[]) AS is_wanted
FROM page JOIN noetl.setting AS s ON s.name = 'shard_count'
ORDER BY page.execution_id
"""
_BOUNDS = "SELECT min(execution_id), max(execution_id) FROM noetl.event"


class Sample(NamedTuple):
    executions: list[ExecutionId]
    upto: ExecutionId
    """Where the next one goes on; 0 when this one has come to the end."""


async def sample(
    conn: Connection | Pool, shards: Collection[ShardId], *, after: ExecutionId, limit: int
) -> Sample:
    """Executions to look at: the newest, and as many that follow a place in the log."""
    wanted = list(shards)
    if not wanted:
        return Sample([], after)
    recent = await conn.fetch(_NEWEST, wanted, limit)
    logged = await conn.fetch(_LOGGED, wanted, after, limit)
    found = [*recent, *(row for row in logged if row["is_wanted"])]
    is_end = len(logged) < limit
    return Sample(
        list(dict.fromkeys(ExecutionId(row[0]) for row in found)),
        ExecutionId(0 if is_end else logged[-1]["execution_id"]),
    )


async def somewhere(conn: Connection | Pool, place: float) -> ExecutionId:
    """From 0 to 1 in the log: ids ascend with time, so a place among them is a moment in it."""
    row = await conn.fetchrow(_BOUNDS)
    if row is None or row[0] is None:
        return ExecutionId(0)
    return ExecutionId(row[0] + int((row[1] - row[0]) * place))


_ROWS = """
SELECT execution_id FROM noetl.execution WHERE execution_id > $1 ORDER BY execution_id LIMIT $2
"""


async def rows_after(
    conn: Connection | Pool, after: ExecutionId, *, limit: int
) -> list[ExecutionId]:
    """A page of the executions that have a row."""
    return [ExecutionId(row[0]) for row in await conn.fetch(_ROWS, after, limit)]


# Between two ids, so that pages together read the index of the log once.
_MISSING = """
SELECT execution_id FROM noetl.event AS e
WHERE execution_id > $1 AND execution_id <= $2 AND event_key = 'start'
  AND NOT EXISTS (SELECT FROM noetl.execution AS x WHERE x.execution_id = e.execution_id)
ORDER BY execution_id
"""


async def missing_between(
    conn: Connection | Pool, *, after: ExecutionId, upto: ExecutionId
) -> list[ExecutionId]:
    """Executions that the log has begun and that have no row."""
    return [ExecutionId(row[0]) for row in await conn.fetch(_MISSING, after, upto)]


# In the order of every other statement on these rows, so that none waits in a circle.
_FENCE_ALL = """
UPDATE noetl.execution_shard SET epoch = epoch + 1, leased_until = NULL, retired_at = NULL
WHERE role = 'projection' AND shard_id = ANY (ARRAY(
    SELECT shard_id FROM noetl.execution_shard WHERE role = 'projection'
    ORDER BY shard_id
    FOR UPDATE
))
"""
_EMPTY = "TRUNCATE noetl.execution, noetl.projection_checkpoint"


async def forget_everything(conn: Connection) -> None:
    """Empty the projection; the log is replayed from its beginning.

    The caller owns the transaction. Raising the epochs first waits for every batch under way and
    makes whoever holds a shard drop what it remembers, so it may be done while projections run.
    Shards that were set aside have an owner again: their part of the log is read anew as well, and
    the shard-manager sets them aside once more.

    No command does this, because nothing has a status meanwhile: `noetl db rebuild-projection`
    writes anew row by row.
    """
    await conn.execute(_FENCE_ALL)
    await conn.execute(_EMPTY)
