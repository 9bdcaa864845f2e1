"""noetl.execution as the projection writes it. Clients read it in execution.py.

A batch is one statement: it proves the leases, writes the rows, parks what could not be read and
moves the watermarks. So a row and the watermark that covers it are there together or not at all.

A row holds nothing but what the log says: its times are the events' times, and an update never goes
back to an earlier event. Truncate, replay, and the same bytes come back.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from noetl_core.domain.ids import EventId, ExecutionId, ShardId
from noetl_core.domain.progress import progress, waiting_on
from noetl_core.domain.state import ExecutionState
from noetl_core.store.postgres import Connection


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


class Parked(NamedTuple):
    """An event that could not be folded: it goes to noetl.dead_letter, the shard goes on."""

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


async def load(
    conn: Connection, execution_ids: Iterable[ExecutionId]
) -> dict[ExecutionId, Projected]:
    """What was projected of these executions; one that has no row yet is left out."""
    rows = await conn.fetch(_LOAD, list(execution_ids))
    return {
        ExecutionId(row["execution_id"]): Projected(
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
        )
        for row in rows
    }


# Every write joins `fence`, so a shard that has another owner by now is left alone while the others
# go on. FOR SHARE makes a new owner's claim wait until this commit is over; the order of the locks
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
        started_at, updated_at, ended_at
    )
    SELECT
        u.execution_id, u.catalog_id, u.path, u.version, u.shard_id, u.status, u.state,
        coalesce(u.state -> 'ctx', '{}'), u.progress, u.waiting_on, u.last_event_type,
        u.last_node_name, u.last_event_id, u.parent_execution_id, u.state -> 'error',
        u.started_at, u.updated_at, u.ended_at
    FROM unnest(
        $3::bigint[], $4::bigint[], $5::text[], $6::integer[], $7::integer[], $8::text[],
        $9::jsonb[], $10::jsonb[], $11::text[], $12::text[], $13::text[], $14::bigint[],
        $15::bigint[], $16::timestamptz[], $17::timestamptz[], $18::timestamptz[]
    ) AS u (
        execution_id, catalog_id, path, version, shard_id, status, state, progress, waiting_on,
        last_event_type, last_node_name, last_event_id, parent_execution_id, started_at, updated_at,
        ended_at
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
        ended_at = excluded.ended_at
    WHERE excluded.last_projected_event_id > x.last_projected_event_id
),
parked AS (
    -- A replay meets the same bad event again: it is parked once.
    INSERT INTO noetl.dead_letter (shard_id, execution_id, source, body, reason)
    SELECT u.shard_id, u.execution_id, 'projection', u.body, u.reason
    FROM unnest($19::integer[], $20::bigint[], $21::bytea[], $22::text[])
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
        -- A replay of last month is further behind than an integer of milliseconds can say.
        least(extract(epoch FROM clock_timestamp() - u.created_at) * 1000, 2147483647)::integer
    FROM unnest($23::integer[], $24::bigint[], $25::timestamptz[])
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
        *_columns([_row(one) for one in changed], 16),
        *_columns(parked, 4),
        list(reached),
        *_columns(list(reached.values()), 2),
    )
    return {ShardId(row["shard_id"]): row["lag_ms"] or 0 for row in rows}


_encode = msgspec.json.Encoder().encode


def _row(one: Projected) -> tuple[object, ...]:
    state = one.state
    return (
        state.execution_id,
        state.catalog_id,
        one.path,
        one.version,
        one.shard_id,
        state.status,
        _encode(state).decode(),
        _encode(progress(state)).decode(),
        waiting_on(state),
        one.last_event_type,
        one.last_node_name,
        one.last_event_id,
        one.parent_execution_id,
        one.started_at,
        one.updated_at,
        one.ended_at,
    )


def _columns(rows: Sequence[tuple[object, ...]], width: int) -> list[tuple[object, ...]]:
    return list(zip(*rows, strict=True)) if rows else [()] * width


# In the order of every other statement on these rows, so that none waits in a circle.
_FENCE_ALL = """
UPDATE noetl.execution_shard SET epoch = epoch + 1, leased_until = NULL
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
    """
    await conn.execute(_FENCE_ALL)
    await conn.execute(_EMPTY)
