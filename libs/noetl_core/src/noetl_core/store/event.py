"""noetl.event: facts to rows and back. The log has one writer, `commit_batch` (store/batch.py).

Fields that have a column go there; the rest of a fact goes into `context`, or into `meta` when it
only informs. A command's step, visit, index and attempt are spelled by its id, so those rows need
neither.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from noetl_core.domain.events import (
    FACT_BY_TYPE,
    AnyFact,
    CallDone,
    CallFailed,
    CallPartial,
    CommandClaimed,
    CommandExpired,
    CommandIssued,
    CommandParked,
    Event,
    event_key,
    type_name,
)
from noetl_core.domain.ids import (
    ID_MAX,
    EpochId,
    EventId,
    ExecutionId,
    ShardId,
    StepName,
    VisitId,
    parse_command_id,
)
from noetl_core.store.postgres import Connection, Pool

_COLUMNS = frozenset(
    {
        *("command_id", "loop_id", "iter_index", "attempt", "catalog_id"),
        *("parent_event_id", "parent_execution_id"),
    }
)
_META = frozenset({"worker_id", "duration_ms", "chunk_index"})
_DOCUMENTS = frozenset({"result", "error"})
_FROM_COMMAND_ID = frozenset({"step", "visit", "iter_index", "attempt", "page"})
_COMMAND_FACTS = (
    CommandIssued,
    CommandClaimed,
    CommandParked,
    CallPartial,
    CallDone,
    CallFailed,
    CommandExpired,
)

_STATUS = {
    "execution.started": "RUNNING",
    "step.enter": "RUNNING",
    "command.issued": "PENDING",
    "command.claimed": "RUNNING",
    "command.parked": "RUNNING",
    "call.partial": "RUNNING",
    "call.done": "COMPLETED",
    "call.error": "FAILED",
    "command.expired": "FAILED",
    "retry.completed": "COMPLETED",
    "loop.started": "RUNNING",
    "loop.done": "COMPLETED",
    "loop.fanout.started": "RUNNING",
    "loop.shard.enqueued": "PENDING",
    "loop.shard.done": "COMPLETED",
    "loop.shard.failed": "FAILED",
    "loop.fanin.completed": "COMPLETED",
    "step.exit": "COMPLETED",
    "step.skipped": "SKIPPED",
    "step.failed": "FAILED",
    "step.aborted": "FAILED",
    "signal.received": "COMPLETED",
    "execution.paused": "PAUSED",
    "execution.resumed": "RUNNING",
    "execution.retried": "RUNNING",
    "checkpoint.committed": "COMPLETED",
    "execution.completed": "COMPLETED",
    "execution.failed": "FAILED",
    "execution.cancelled": "CANCELLED",
}

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class EventRow(NamedTuple):
    """The columns of `noetl.event` in the order of `commit_batch`; JSON as text."""

    execution_id: int
    event_id: int
    event_key: str
    shard_id: int
    event_type: str
    status: str | None
    node_name: str | None
    command_id: str | None
    loop_id: int | None
    iter_index: int | None
    attempt: int | None
    parent_event_id: int | None
    parent_execution_id: int | None
    catalog_id: int | None
    epoch_id: int | None
    context: str | None
    result: str | None
    meta: str | None
    error: str | None


class _Layout(NamedTuple):
    """Where the fields of one kind of fact go: (name, default) pairs."""

    context: tuple[tuple[str, Any], ...]
    meta: tuple[tuple[str, Any], ...]


def _layout(kind: type[Any]) -> _Layout:
    skip = _COLUMNS | _DOCUMENTS | {"step"}
    if issubclass(kind, _COMMAND_FACTS):
        skip |= _FROM_COMMAND_ID
    fields = [(f.name, f.default) for f in msgspec.structs.fields(kind) if f.name not in skip]
    return _Layout(
        context=tuple(f for f in fields if f[0] not in _META),
        meta=tuple(f for f in fields if f[0] in _META),
    )


_LAYOUTS = {kind: _layout(kind) for kind in FACT_BY_TYPE.values()}


def event_row(event: Event, *, shard_id: ShardId, epoch_id: EpochId | None) -> EventRow:
    fact = event.fact
    layout = _LAYOUTS[type(fact)]
    kind = type_name(fact)
    result = getattr(fact, "result", None)
    error = getattr(fact, "error", None)
    return EventRow(
        event.execution_id,
        event.event_id,
        event_key(fact),
        shard_id,
        kind,
        _STATUS[kind],
        getattr(fact, "step", None),
        getattr(fact, "command_id", None),
        getattr(fact, "loop_id", None),
        getattr(fact, "iter_index", None),
        getattr(fact, "attempt", None),
        getattr(fact, "parent_event_id", None),
        getattr(fact, "parent_execution_id", None),
        getattr(fact, "catalog_id", None),
        epoch_id,
        _document(fact, layout.context),
        None if result is None else _encode(result).decode(),
        _document(fact, layout.meta),
        None if error is None else _encode(error).decode(),
    )


def _document(fact: AnyFact, fields: tuple[tuple[str, Any], ...]) -> str | None:
    if not fields:
        return None
    document = {n: v for n, default in fields if (v := getattr(fact, n)) != default and v != {}}
    return _encode(document).decode() if document else None


def event_of(row: Any) -> Event:
    """The inverse of `event_row`, for any row with its columns (a database record too)."""
    kind = FACT_BY_TYPE[row["event_type"]]
    fields: dict[str, Any] = {}
    for column in ("context", "meta"):
        if row[column] is not None:
            fields.update(_decode(row[column]))
    for column in ("result", "error"):
        if row[column] is not None:
            fields[column] = _decode(row[column])
    for column in _COLUMNS:
        if row[column] is not None:
            fields[column] = row[column]
    if issubclass(kind, _COMMAND_FACTS):
        parts = parse_command_id(row["command_id"])
        fields.update(step=parts.step, visit=parts.visit)
        if kind is CommandIssued:
            fields["page"] = parts.page
    elif row["node_name"] is not None:
        fields["step"] = row["node_name"]
    return Event(
        execution_id=row["execution_id"],
        event_id=row["event_id"],
        fact=msgspec.convert(fields, kind),
    )


_FIELDS = """
execution_id, event_id, event_type, node_name, command_id, loop_id, iter_index, attempt,
parent_event_id, parent_execution_id, catalog_id, context, result, meta, error, shard_id, created_at
"""

_READ_TAILS = f"""
SELECT tail.*
FROM unnest($1::bigint[], $2::bigint[]) AS wanted (execution, after)
CROSS JOIN LATERAL (
    SELECT {_FIELDS}
    FROM noetl.event
    WHERE execution_id = wanted.execution AND event_id > wanted.after
    ORDER BY event_id
    LIMIT $3
) AS tail
"""  # noqa: S608 - the fields are a constant


async def read_tails(
    conn: Connection, after: dict[ExecutionId, EventId], *, limit: int
) -> list[Any]:
    """Up to `limit` rows of each execution past its watermark, in log order; decode with
    `event_of`."""
    return list(await conn.fetch(_READ_TAILS, list(after), list(after.values()), limit))


_READ_BETWEEN = f"""
SELECT {_FIELDS}
FROM noetl.event
WHERE execution_id = $1 AND event_id > $2 AND event_id < $3
ORDER BY event_id
LIMIT $4
"""  # noqa: S608 - the fields are a constant


async def read_between(
    conn: Connection | Pool,
    execution_id: ExecutionId,
    *,
    after: EventId,
    before: EventId,
    limit: int,
) -> list[Event]:
    """A page of one execution's log, in log order."""
    rows = await conn.fetch(_READ_BETWEEN, execution_id, after, before, limit)
    return [event_of(row) for row in rows]


_READ_UPTO = f"""
SELECT {_FIELDS}
FROM noetl.event
WHERE execution_id = $1 AND event_id > $2 AND event_id <= $3
ORDER BY event_id
LIMIT $4
"""  # noqa: S608 - the fields are a constant


async def read_upto(
    conn: Connection | Pool, execution_id: ExecutionId, *, after: EventId, upto: EventId, limit: int
) -> list[Any]:
    """A page of rows of one execution, in log order; decode with `event_of`."""
    return list(await conn.fetch(_READ_UPTO, execution_id, after, upto, limit))


_STARTED_AS = "SELECT event_id FROM noetl.event WHERE execution_id = $1 AND event_key = 'start'"


async def started_as(conn: Connection | Pool, execution_id: ExecutionId) -> EventId | None:
    """The event with which it began: its payload is stored under this id."""
    event_id: EventId | None = await conn.fetchval(_STARTED_AS, execution_id)
    return event_id


_IDS_OF = """
SELECT execution_id, event_key, event_id
FROM unnest($1::bigint[], $2::text[]) AS wanted (execution_id, event_key)
JOIN noetl.event USING (execution_id, event_key)
"""


async def ids_of(
    conn: Connection | Pool, keys: Sequence[tuple[ExecutionId, str]]
) -> dict[tuple[ExecutionId, str], EventId]:
    """The events with these natural keys; one that is not recorded is left out."""
    if not keys:
        return {}
    rows = await conn.fetch(_IDS_OF, *map(list, zip(*keys, strict=True)))
    return {(ExecutionId(row[0]), row[1]): EventId(row[2]) for row in rows}


_OPEN_VISITS = """
SELECT e.execution_id, substr(e.event_key, 1 + length('step.enter:')), e.event_id
FROM unnest($1::bigint[], $2::bigint[]) AS wanted (execution_id, event_id)
JOIN noetl.event AS e
    ON e.execution_id = wanted.execution_id AND e.event_id < wanted.event_id
    AND e.event_type = 'step.enter'
WHERE NOT EXISTS (
    SELECT FROM noetl.event AS l
    WHERE l.execution_id = e.execution_id
      AND l.event_key = 'leave:' || substr(e.event_key, 1 + length('step.enter:'))
)
"""


async def open_visits(
    conn: Connection | Pool, moments: Mapping[ExecutionId, EventId]
) -> dict[tuple[ExecutionId, VisitId], EventId]:
    """The visits that nobody has left, of these executions before these events: when they began."""
    if not moments:
        return {}
    rows = await conn.fetch(_OPEN_VISITS, list(moments), list(moments.values()))
    return {(ExecutionId(row[0]), VisitId(row[1])): EventId(row[2]) for row in rows}


_ENTRIES = """
SELECT node_name, max(event_id) FROM noetl.event
WHERE execution_id = $1 AND event_type = 'step.enter'
GROUP BY node_name
"""


async def entries(conn: Connection | Pool, execution_id: ExecutionId) -> dict[StepName, EventId]:
    """Every step that was entered, with the event of the last time."""
    return {StepName(row[0]): EventId(row[1]) for row in await conn.fetch(_ENTRIES, execution_id)}


_READ_SHARDS = f"""
SELECT tail.*
FROM unnest($1::integer[], $2::bigint[]) AS wanted (shard, after)
CROSS JOIN LATERAL (
    SELECT {_FIELDS}
    FROM noetl.event
    WHERE shard_id = wanted.shard AND event_id > wanted.after AND event_id <= $4
    ORDER BY event_id
    LIMIT $3
) AS tail
"""  # noqa: S608 - the fields are a constant


async def read_shards(
    conn: Connection, after: dict[ShardId, EventId], *, limit: int, upto: EventId | None = None
) -> list[Any]:
    """Up to `limit` rows of each shard past its watermark, in log order; decode with `event_of`."""
    last = ID_MAX if upto is None else upto
    return list(await conn.fetch(_READ_SHARDS, list(after), list(after.values()), limit, last))


_NEWEST = """
SELECT coalesce(max(newest.event_id), 0)
FROM unnest($1::integer[]) AS wanted (shard)
CROSS JOIN LATERAL (
    SELECT event_id FROM noetl.event WHERE shard_id = wanted.shard ORDER BY event_id DESC LIMIT 1
) AS newest
"""


class Newest(NamedTuple):
    event_id: EventId
    epoch: EpochId
    """The epoch that its broker had closed last; 0 when it did not know of any."""


_NEWEST_EACH = """
SELECT wanted.shard, newest.event_id, coalesce(newest.epoch_id, 0)
FROM unnest($1::integer[]) AS wanted (shard)
CROSS JOIN LATERAL (
    SELECT event_id, epoch_id FROM noetl.event
    WHERE shard_id = wanted.shard
    ORDER BY event_id DESC
    LIMIT 1
) AS newest
"""


async def newest_events(
    conn: Connection | Pool, shards: Iterable[ShardId]
) -> dict[ShardId, Newest]:
    """The last event of each of these shards; one without events is left out."""
    rows = await conn.fetch(_NEWEST_EACH, list(shards))
    return {ShardId(row[0]): Newest(EventId(row[1]), EpochId(row[2])) for row in rows}


async def newest_event_id(conn: Connection | Pool, shards: Iterable[ShardId]) -> EventId:
    """The last id of these shards: a new owner must mint above it."""
    return EventId(await conn.fetchval(_NEWEST, list(shards)))


_ENDED = """
SELECT event_type <> 'execution.retried' FROM noetl.event
WHERE execution_id = $1 AND event_id > $2 AND event_type IN
    ('execution.completed', 'execution.failed', 'execution.cancelled', 'execution.retried')
ORDER BY event_id DESC LIMIT 1
"""


async def has_ended_since(
    conn: Connection | Pool, execution_id: ExecutionId, after: EventId
) -> bool:
    """Whether the log says so, beyond an event that the status shows."""
    return bool(await conn.fetchval(_ENDED, execution_id, after))
