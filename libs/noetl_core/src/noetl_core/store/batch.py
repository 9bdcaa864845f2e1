"""One broker batch: what it appends, closes, issues and stores, committed by one function call.

`noetl.commit_batch` proves the lease of every shard in the batch, so nothing is written after
another process took a shard over. Loops that start, letters that are parked and refusals that are
audited are rare: they cost a statement of their own, inside the same transaction.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import asyncpg
import msgspec

from noetl_core.domain.events import ExecutionRetried
from noetl_core.domain.ids import CommandId, EventId, ExecutionId, LoopId, ShardId, WorkerId
from noetl_core.store.event import EventRow
from noetl_core.store.postgres import Connection, in_transaction

FENCED = "NS001"
HELD_BY_ANOTHER = "NS002"
ARCHIVED = "NS003"

_encode = msgspec.json.Encoder().encode


class EndedRow(NamedTuple):
    execution_id: ExecutionId
    command_id: CommandId
    worker_id: WorkerId | None
    """None: whoever holds it (an expired lease)."""


class CommandRow(NamedTuple):
    execution_id: ExecutionId
    command_id: CommandId
    shard_id: ShardId
    step: str
    attempt: int
    pool: str
    priority: int
    delay_s: float
    payload: bytes


class PlacementRow(NamedTuple):
    """Who may take a command of this batch: at first only its target, and never who lacks what it
    requires."""

    execution_id: ExecutionId
    command_id: CommandId
    target_worker: WorkerId | None
    target_s: float
    requires: str
    """One a line; empty for nothing."""


class ResultRow(NamedTuple):
    execution_id: ExecutionId
    ref_id: EventId
    parent_ref_id: int | None
    step: str
    store_tier: str
    physical_uri: str | None
    media_type: str
    size: int
    sha256: bytes
    inline: bytes | None


class PartRow(NamedTuple):
    execution_id: ExecutionId
    manifest_id: LoopId | EventId
    part_index: int
    item_count: int
    store_tier: str
    physical_uri: str | None
    size: int
    sha256: bytes | None
    inline: bytes | None
    ref_id: EventId | None = None
    """Where the part is a result of its own."""


class ManifestRow(NamedTuple):
    """A collection of a loop, or the pages of a sequence of calls. `meta` is JSON."""

    execution_id: ExecutionId
    manifest_id: LoopId | EventId
    kind: str
    step: str
    item_count: int
    part_count: int
    meta: str | None = None


class OutgoingRow(NamedTuple):
    """A message for another execution: it is in that one's inbox when this batch is committed."""

    execution_id: ExecutionId
    body: bytes
    sender: ExecutionId | None = None
    """Whose event is the reason: without that event there is no message."""


class TimerRow(NamedTuple):
    """Due after `delay_s`, or at `until_ms` of the clock."""

    execution_id: ExecutionId
    timer: str
    delay_s: float | None = None
    until_ms: int | None = None


class FiredRow(NamedTuple):
    execution_id: ExecutionId
    timer: str


class ExpiryRow(NamedTuple):
    """A result that may go after a while."""

    execution_id: ExecutionId
    ref_id: EventId
    ttl_s: float


class DeadLetterRow(NamedTuple):
    shard_id: ShardId
    execution_id: ExecutionId | None
    source: str
    body: bytes
    reason: str


class RefusalRow(NamedTuple):
    """A completion from a worker that does not hold the lease."""

    actor: str
    execution_id: ExecutionId
    subject: str


class Batch:
    """Rows on their way into one transaction."""

    def __init__(self) -> None:
        self.fences: dict[ShardId, int] = {}
        self.events: list[EventRow] = []
        self.ended: list[EndedRow] = []
        self.ended_executions: list[ExecutionId] = []
        self.commands: list[CommandRow] = []
        self.placements: list[PlacementRow] = []
        self.results: list[ResultRow] = []
        self.manifests: list[ManifestRow] = []
        self.parts: list[PartRow] = []
        self.outgoing: list[OutgoingRow] = []
        self.timers: list[TimerRow] = []
        self.timers_fired: list[FiredRow] = []
        self.untimed: set[ExecutionId] = set()
        """Executions that have ended, and with them all their timers."""
        self.expiries: list[ExpiryRow] = []
        self.is_held: dict[ExecutionId, bool] = {}
        """Executions whose waiting commands are held back from now on, or let go again."""
        self.dead_letters: list[DeadLetterRow] = []
        self.refusals: list[RefusalRow] = []
        self.inbox_ids: list[int] = []

    @property
    def is_empty(self) -> bool:
        return not (
            self.events
            or self.inbox_ids
            or self.dead_letters
            or self.refusals
            or self.timers_fired
            or self.outgoing
        )

    @property
    def has_extras(self) -> bool:
        """Whether there is more than events, commands and results, which nearly every batch has."""
        return bool(
            self.placements
            or self.manifests
            or self.parts
            or self.dead_letters
            or self.refusals
            or self.outgoing
            or self.timers
            or self.timers_fired
            or self.untimed
            or self.expiries
            or self.is_held
        )

    def recall(self, execution_id: ExecutionId, commands: Collection[CommandId]) -> None:
        """Issue these not after all. The commit ends commands before it issues any, so one that is
        issued and ended in the same batch would stay."""
        self.commands[:] = [
            row
            for row in self.commands
            if row.execution_id != execution_id or row.command_id not in commands
        ]

    def stop_timer(self, execution_id: ExecutionId, timer: str) -> None:
        """The commit removes timers before it sets any, so one of this batch is not set at all."""
        self.timers[:] = [
            t for t in self.timers if (t.execution_id, t.timer) != (execution_id, timer)
        ]
        self.timers_fired.append(FiredRow(execution_id, timer))

    def forget(self, execution_id: ExecutionId) -> None:
        """Take back everything this batch holds of an execution that could not be processed."""
        _keep_others(self.events, execution_id)
        _keep_others(self.ended, execution_id)
        _keep_others(self.commands, execution_id)
        _keep_others(self.placements, execution_id)
        _keep_others(self.results, execution_id)
        _keep_others(self.manifests, execution_id)
        _keep_others(self.parts, execution_id)
        _keep_others(self.timers, execution_id)
        _keep_others(self.expiries, execution_id)
        self.outgoing = [row for row in self.outgoing if row.sender != execution_id]
        self.untimed.discard(execution_id)
        self.is_held.pop(execution_id, None)
        self.ended_executions = [e for e in self.ended_executions if e != execution_id]


_Row = TypeVar(
    "_Row",
    EventRow,
    EndedRow,
    CommandRow,
    PlacementRow,
    ResultRow,
    ManifestRow,
    PartRow,
    TimerRow,
    ExpiryRow,
)


def _keep_others(rows: list[_Row], execution_id: ExecutionId) -> None:
    rows[:] = [row for row in rows if row.execution_id != execution_id]


# One letter a column: numbers, texts, bytes. asyncpg looks at each element of an array for nested
# ones, which cost a third of a broker's time; an array written as text costs it one string.
_NUMBERS, _TEXTS, _BYTES = "n", "t", "b"
_EVENT_COLUMNS = "nntnttttnnnnnnntttt"
_ENDED_COLUMNS = "ntt"
_COMMAND_COLUMNS = "ntntntnnb"
_RESULT_COLUMNS = "nnnttttnbb"

_TYPES = [
    *("integer[]", "bigint[]"),
    *("bigint[]", "bigint[]", "text[]", "integer[]", *["text[]"] * 4, "bigint[]"),
    *("integer[]", "integer[]", *["bigint[]"] * 4, *["text[]"] * 4),
    *("bigint[]", "text[]", "text[]"),
    "bigint[]",
    *("bigint[]", "text[]", "integer[]", "text[]", "integer[]", "text[]", "integer[]"),
    *("double precision[]", "bytea[]"),
    *("bigint[]", "bigint[]", "bigint[]", *["text[]"] * 4, "bigint[]", "bytea[]", "bytea[]"),
    "bigint[]",
]
_COMMIT = "SELECT noetl.commit_batch({})".format(
    ", ".join(
        f"${n}::{kind}" if kind == "bytea[]" else f"${n}::text::{kind}"
        for n, kind in enumerate(_TYPES, start=1)
    )
)


async def commit(conn: Connection, batch: Batch) -> set[ShardId]:
    """All or nothing; says whose inbox has got something.

    Raises asyncpg errors with sqlstate FENCED, HELD_BY_ANOTHER, ARCHIVED or 23505.
    """
    revived = [row.execution_id for row in batch.events if row.event_type == _REVIVES]
    if not batch.has_extras and not revived:
        await _commit_rows(conn, batch)
        return set()
    return await in_transaction(conn, partial(_commit_with_extras, batch, revived))


async def _commit_with_extras(batch: Batch, revived: list[int], conn: Connection) -> set[ShardId]:
    await _commit_rows(conn, batch)
    await _require_start(conn, revived)
    await _place(conn, batch)
    await _insert_manifests(conn, batch)
    await _insert_dead_letters(conn, batch)
    await _insert_refusals(conn, batch)
    await _change_timers(conn, batch)
    await _hold_or_let_go(conn, batch)
    await _say_expiries(conn, batch)
    return await _send_outgoing(conn, batch)


async def _commit_rows(conn: Connection, batch: Batch) -> None:
    await conn.execute(
        _COMMIT,
        _numbers(list(batch.fences)),
        _numbers(list(batch.fences.values())),
        *_arrays(batch.events, _EVENT_COLUMNS),
        *_arrays(batch.ended, _ENDED_COLUMNS),
        _numbers(batch.ended_executions),
        *_arrays(batch.commands, _COMMAND_COLUMNS),
        *_arrays(batch.results, _RESULT_COLUMNS),
        _numbers(batch.inbox_ids),
    )


_REVIVES = ExecutionRetried.__struct_config__.tag
_REQUIRE_START = "SELECT noetl.require_start($1)"


async def _require_start(conn: Connection, revived: Sequence[int]) -> None:
    """Only what has ended is archived, so only what goes on after its end may find its log gone.

    The gateway looks before it promises a retry, but the log may go between that and this. Our
    inserts keep it from now on, until the transaction is over.
    """
    if revived:
        await conn.execute(_REQUIRE_START, revived)


def _arrays(rows: Sequence[tuple[object, ...]], kinds: str) -> list[object]:
    """The rows as columns, each in the form its kind is sent in."""
    columns = _columns(rows, len(kinds))
    return [_SENT_AS[kind](column) for kind, column in zip(kinds, columns, strict=True)]


def _numbers(column: Sequence[object]) -> str:
    """`{1,2,NULL}`: Python's own spelling of a list of numbers, but for the brackets and None."""
    return "{" + str(list(column))[1:-1].replace("None", "NULL") + "}"


def _texts(column: Sequence[object]) -> str:
    """`{"a","b",NULL}`. JSON escapes quotes and backslashes as Postgres does, and null is its NULL.

    Only control characters differ. Names have none (the parser sees to it) and JSON documents
    carry theirs escaped already.
    """
    return "{" + _encode(column).decode()[1:-1] + "}"


def _bytes(column: Sequence[object]) -> Sequence[object]:
    return column


_SENT_AS: dict[str, Callable[[Sequence[object]], object]] = {
    _NUMBERS: _numbers,
    _TEXTS: _texts,
    _BYTES: _bytes,
}


def _columns(rows: Sequence[tuple[object, ...]], width: int) -> list[tuple[object, ...]]:
    return list(zip(*rows, strict=True)) if rows else [()] * width


# Commands that are placed are rare, so they pay for it and the others do not: a second write to
# rows that nobody has seen yet. One that was recalled in this batch has no row, which is fine.
_PLACE = """
UPDATE noetl.command AS c
SET target_worker = u.target_worker,
    target_until = CASE
        WHEN u.target_worker IS NOT NULL
        THEN c.available_at + make_interval(secs => u.target_seconds)
    END,
    requires = string_to_array(nullif(u.requires, ''), E'\\n')
FROM unnest($1::bigint[], $2::text[], $3::text[], $4::double precision[], $5::text[])
    AS u (execution_id, command_id, target_worker, target_seconds, requires)
WHERE c.execution_id = ANY (ARRAY[u.execution_id])
  AND c.command_id = ANY (ARRAY[u.command_id])
"""


async def _place(conn: Connection, batch: Batch) -> None:
    if batch.placements:
        await conn.execute(_PLACE, *_columns(batch.placements, 5))


_MANIFESTS = """
INSERT INTO noetl.manifest (
    execution_id, manifest_id, kind, step, item_count, part_count, meta
)
SELECT * FROM unnest(
    $1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::bigint[], $6::integer[], $7::jsonb[]
)
"""

_PARTS = """
INSERT INTO noetl.manifest_part (
    execution_id, manifest_id, part_index, item_count, store_tier, physical_uri, bytes, sha256,
    inline, ref_id
)
SELECT * FROM unnest(
    $1::bigint[], $2::bigint[], $3::integer[], $4::integer[], $5::text[], $6::text[], $7::bigint[],
    $8::bytea[], $9::bytea[], $10::bigint[]
)
"""


async def _insert_manifests(conn: Connection, batch: Batch) -> None:
    if batch.manifests:
        await conn.execute(_MANIFESTS, *_columns(batch.manifests, 7))
    if batch.parts:
        await conn.execute(_PARTS, *_columns(batch.parts, 10))


# The shard is worked out where the shard count is, so a message never goes by a stale one.
_OUTGOING = """
INSERT INTO noetl.inbox (shard_id, execution_id, body)
SELECT noetl.vnode(u.execution_id) % s.value::integer, u.execution_id, u.body
FROM unnest($1::bigint[], $2::bytea[]) AS u (execution_id, body)
JOIN noetl.setting AS s ON s.name = 'shard_count'
RETURNING shard_id
"""


async def _send_outgoing(conn: Connection, batch: Batch) -> set[ShardId]:
    if not batch.outgoing:
        return set()
    sent = [(row.execution_id, row.body) for row in batch.outgoing]
    rows = await conn.fetch(_OUTGOING, *_columns(sent, 2))
    return {ShardId(row["shard_id"]) for row in rows}


_SET_TIMERS = """
INSERT INTO noetl.timer (execution_id, timer, due_at)
SELECT execution_id, timer,
       coalesce(to_timestamp(until_ms / 1000.0), now() + make_interval(secs => delay))
FROM unnest($1::bigint[], $2::text[], $3::double precision[], $4::bigint[])
    AS u (execution_id, timer, delay, until_ms)
ON CONFLICT (execution_id, timer) DO UPDATE SET due_at = excluded.due_at
"""

_TIMERS_FIRED = """
DELETE FROM noetl.timer t
USING unnest($1::bigint[], $2::text[]) AS u (execution_id, timer)
WHERE t.execution_id = u.execution_id AND t.timer = u.timer
"""

_NO_TIMERS = "DELETE FROM noetl.timer WHERE execution_id = ANY ($1::bigint[])"


async def _change_timers(conn: Connection, batch: Batch) -> None:
    if batch.timers_fired:
        await conn.execute(_TIMERS_FIRED, *_columns(batch.timers_fired, 2))
    if batch.timers:
        await conn.execute(_SET_TIMERS, *_columns(batch.timers, 4))
    if batch.untimed:
        await conn.execute(_NO_TIMERS, list(batch.untimed))


_HOLD_OR_LET_GO = """
UPDATE noetl.command SET status = CASE WHEN status = 'held' THEN 'pending' ELSE 'held' END
WHERE execution_id = ANY ($1::bigint[]) AND status = $2
"""


async def _hold_or_let_go(conn: Connection, batch: Batch) -> None:
    for is_held, found in ((True, "pending"), (False, "held")):
        executions = [e for e, held in batch.is_held.items() if held is is_held]
        if executions:
            await conn.execute(_HOLD_OR_LET_GO, executions, found)


_EXPIRIES = "SELECT noetl.set_expiries($1, $2, $3)"


async def _say_expiries(conn: Connection, batch: Batch) -> None:
    if batch.expiries:
        await conn.execute(_EXPIRIES, *_columns(batch.expiries, 3))


_DEAD_LETTERS = """
INSERT INTO noetl.dead_letter (shard_id, execution_id, source, body, reason)
SELECT u.*
FROM unnest($1::integer[], $2::bigint[], $3::text[], $4::bytea[], $5::text[])
    AS u (shard_id, execution_id, source, body, reason)
WHERE NOT EXISTS (
    SELECT FROM noetl.dead_letter AS d
    WHERE d.execution_id = u.execution_id AND d.source = u.source AND d.body = u.body
)
"""


async def _insert_dead_letters(conn: Connection, batch: Batch) -> None:
    """Who is not understood says it again and again: it is kept once."""
    if batch.dead_letters:
        await conn.execute(_DEAD_LETTERS, *_columns(batch.dead_letters, 5))


_REFUSALS = """
INSERT INTO noetl.audit (actor, execution_id, subject, action)
SELECT u.*, 'completion.refused' FROM unnest($1::text[], $2::bigint[], $3::text[]) AS u
"""


async def _insert_refusals(conn: Connection, batch: Batch) -> None:
    if batch.refusals:
        await conn.execute(_REFUSALS, *_columns(batch.refusals, 3))


def is_fenced(error: asyncpg.PostgresError) -> bool:
    return bool(error.sqlstate == FENCED)
