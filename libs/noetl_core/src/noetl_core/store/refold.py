"""Rows of noetl.execution made anew from the log: the fold of the projection, its auditor, rebuild.

A row is a function of the execution's events up to `last_projected_event_id`, and events never
change; so to look whether it is right needs no lock, however long that takes. To put it right does:
the epoch of the shard rises first, which waits for the batch under way and makes the projection
that holds the shard forget the state it has in memory.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

import msgspec

from noetl_core.domain.errors import NoetlError
from noetl_core.domain.events import Event, ExecutionStarted
from noetl_core.domain.fold import fold
from noetl_core.domain.ids import EventId, ExecutionId, ShardId
from noetl_core.domain.sharding import shard_of
from noetl_core.domain.state import ExecutionState
from noetl_core.store import event, execution_projection, projection_checkpoint, setting
from noetl_core.store.execution_projection import Projected, Standing
from noetl_core.store.postgres import Connection, Pool

PAGE_SIZE = 500
"""Events folded between two breaths: whoever shares the process gets its turn."""


def advance(known: Projected | None, row: Any, happened: Event) -> Projected:
    """The row after one more event. What was known is updated in place."""
    created_at: datetime = row["created_at"]
    one = known if known is not None else _first(row)
    one.state = fold(one.state, happened)
    one.last_event_id = happened.event_id
    one.last_event_type = row["event_type"]
    one.shard_id = ShardId(row["shard_id"])  # it changes with the shard count
    one.updated_at = created_at
    if row["node_name"] is not None:
        one.last_node_name = row["node_name"]
    fact = happened.fact
    if type(fact) is ExecutionStarted:  # isinstance is slow for a struct of another class
        one.path, one.version = fact.path, fact.version
        one.parent_execution_id = fact.parent_execution_id
    if not one.state.is_terminal:
        one.ended_at = None  # also of one that had ended and was retried
    elif one.ended_at is None:
        one.ended_at = created_at
    return one


def _first(row: Any) -> Projected:
    return Projected(
        state=ExecutionState(execution_id=ExecutionId(row["execution_id"])),
        shard_id=ShardId(row["shard_id"]),
        started_at=row["created_at"],
        updated_at=row["created_at"],
        last_event_type=row["event_type"],
        last_event_id=EventId(0),
    )


_to_bytes = msgspec.msgpack.Encoder().encode
_from_bytes = msgspec.msgpack.Decoder(Projected).decode


def copied(known: Projected | None) -> Projected | None:
    return None if known is None else _from_bytes(_to_bytes(known))


class LongLogError(NoetlError):
    """The execution has more events than the caller wants to fold: leave it out."""


async def refold(
    conn: Connection | Pool,
    execution_id: ExecutionId,
    *,
    upto: EventId,
    onto: Projected | None = None,
    events_max: int | None = None,
) -> Projected | None:
    """The row as the log has it, up to an event; None when the log has nothing of the execution.

    `onto` is a row that was folded before, and is folded further.
    """
    after = EventId(0) if onto is None else onto.last_event_id
    log = partial(_log, conn, execution_id, after=after, upto=upto, events_max=events_max)
    try:
        return await _fold(copied(onto), log(), carefully=False)
    except LongLogError:
        raise
    except Exception:  # noqa: BLE001 - an event that the projection parked; it is left out again
        return await _fold(onto, log(), carefully=True)


async def _fold(
    one: Projected | None, rows: AsyncIterator[Any], *, carefully: bool
) -> Projected | None:
    async for row in rows:
        try:
            one = advance(copied(one) if carefully else one, row, event.event_of(row))
        except Exception:
            if not carefully:
                raise
    return one


async def _log(
    conn: Connection | Pool,
    execution_id: ExecutionId,
    *,
    after: EventId,
    upto: EventId,
    events_max: int | None,
) -> AsyncIterator[Any]:
    read = 0
    while True:
        rows = await event.read_upto(conn, execution_id, after=after, upto=upto, limit=PAGE_SIZE)
        read += len(rows)
        if events_max is not None and read > events_max:
            raise LongLogError(f"execution {execution_id} has more than {events_max} events")
        for row in rows:
            yield row
        if len(rows) < PAGE_SIZE:
            return
        after = EventId(rows[-1]["event_id"])


class Difference(NamedTuple):
    """A row that is not what its log says. `expected` is; `standing` is None if there is no row."""

    execution_id: ExecutionId
    columns: tuple[str, ...]
    expected: Projected
    standing: Standing | None


async def compare(
    conn: Connection | Pool, execution_id: ExecutionId, *, events_max: int | None = None
) -> Difference | None:
    """Fold the execution again and look whether its row says the same.

    An execution whose events are gone, because it was archived, cannot differ. Raises LongLogError
    for one that has more than `events_max` of them.
    """
    # The watermark before the row: a row is never behind a watermark that was read before it.
    covered = await projection_checkpoint.projected_upto(conn, execution_id)
    standing = await _standing(conn, execution_id)
    upto = _upto(covered, standing)
    expected = await refold(conn, execution_id, upto=upto, events_max=events_max)
    if expected is None:
        return None
    columns = execution_projection.differing(standing, expected)
    if not columns or await _is_archived(conn, execution_id):
        return None
    return Difference(execution_id, columns, expected, standing)


async def _standing(conn: Connection | Pool, execution_id: ExecutionId) -> Standing | None:
    return (await execution_projection.standing(conn, [execution_id])).get(execution_id)


def _upto(covered: EventId, standing: Standing | None) -> EventId:
    return covered if standing is None else max(covered, standing.last_event_id)


async def _is_archived(conn: Connection | Pool, execution_id: ExecutionId) -> bool:
    """Asked after a fold: had the events been dropped between two pages, the start would be gone
    with them, and what was folded were half of the log.
    """
    return await event.started_as(conn, execution_id) is None


async def heal(pool: Pool, differences: Sequence[Difference]) -> None:
    """Write the rows anew, shard by shard, and leave a dead letter that says what was there."""
    left = list(differences)
    while left:
        count = await setting.shard_count(pool)
        by_shards: dict[tuple[ShardId, ...], list[Difference]] = {}
        for one in left:
            # The shard of its last event may be another than that of the next one.
            shards = {one.expected.shard_id, shard_of(one.execution_id, shard_count=count)}
            by_shards.setdefault(tuple(sorted(shards)), []).append(one)
        left = []
        for fenced, found in by_shards.items():
            async with pool.acquire() as conn, conn.transaction():
                if not await _heal(conn, fenced, found, shard_count=count):
                    left += found


async def _heal(
    conn: Connection,
    shards: Sequence[ShardId],
    differences: Iterable[Difference],
    *,
    shard_count: int,
) -> bool:
    """False when the shard count has changed meanwhile: these are not the shards to fence."""
    await execution_projection.fence(conn, shards)
    # Another change of the count has to wait for the fence.
    if await setting.shard_count(conn) != shard_count:
        return False
    for one in differences:
        await _heal_one(conn, one)
    return True


async def _heal_one(conn: Connection, one: Difference) -> None:
    # The projection may have gone on since it was compared; from here on it cannot.
    covered = await projection_checkpoint.projected_upto(conn, one.execution_id)
    now = await _standing(conn, one.execution_id)
    row = await refold(conn, one.execution_id, upto=_upto(covered, now), onto=one.expected)
    assert row is not None, one.execution_id
    if await _is_archived(conn, one.execution_id):
        return
    seen = None if now is None else now.last_event_id
    if await execution_projection.rewrite(conn, row, seen=seen):
        await execution_projection.park_difference(
            conn, row.shard_id, one.execution_id, columns=one.columns, standing=one.standing
        )
