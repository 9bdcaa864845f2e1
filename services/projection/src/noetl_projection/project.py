"""The turn of the projection: read what the log has grown by, fold it, write the status rows.

  noetl.event ──(event_id > watermark, in order)──> fold ──> noetl.execution + the next watermark

The broker is a shard's only writer and its ids ascend in commit order, so what is read is a prefix
of what will ever follow the watermark: nothing can appear behind it later. The rows and the
watermark are written by one statement that proves the shard's lease, so two projections never write
one shard, and a crash anywhere leaves either the whole batch or none of it.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

import msgspec
import structlog

from noetl_core.domain.ids import EventId, ExecutionId, ShardId
from noetl_core.store import event, execution_projection, projection_checkpoint, resize
from noetl_core.store.execution_projection import Parked, Projected, Reached
from noetl_core.store.postgres import Connection, Pool
from noetl_core.store.refold import advance, copied
from noetl_projection import metrics
from noetl_projection.memory import Memory
from noetl_projection.unreadable import load_rows

TURN_EVENTS_MAX = 4000
"""Of all shards together, while more than one is behind. Few large turns catch up sooner than many
small ones: the row of a busy execution is large, and every turn writes it anew."""

log = structlog.get_logger()


class Shards(Protocol):
    """The shards that this process owns (process/ownership.py)."""

    def held(self) -> Mapping[ShardId, int]:
        """Shard -> the epoch of our lease."""

    def claimed(self) -> Collection[ShardId]:
        """Those, and what was ours when the lease ran out and nobody is known to have taken."""

    async def lost(self, shard_ids: Collection[ShardId]) -> None:
        """A commit was refused: these shards have another owner."""


async def project(pool: Pool, shards: Shards, memory: Memory, *, batch_size: int) -> int:
    """One turn over the shards we hold. Says how many events it has passed."""
    memory.keep(shards.held())
    memory.ended, memory.ended_rows, memory.has_closed = [], [], False
    # Also while the lease has lapsed: who cannot reach Postgres is behind.
    metrics.say_claimed(shards.claimed())
    if not memory.epochs:
        return 0
    try:
        async with pool.acquire() as conn:
            return await _project(conn, shards, memory, batch_size=batch_size)
    except BaseException:
        # The states may be ahead of the rows, or the commit may have happened unseen.
        memory.clear()
        raise


async def _project(conn: Connection, shards: Shards, memory: Memory, *, batch_size: int) -> int:
    unread = memory.epochs.keys() - memory.watermarks.keys()
    if unread:
        memory.watermarks.update(await projection_checkpoint.watermarks(conn, unread))
        memory.behind = len(memory.epochs)
    if unread or memory.boundary is not None:
        memory.boundary = await resize.next_boundary(conn)
    limit = max(1, min(batch_size, TURN_EVENTS_MAX // max(1, memory.behind)))
    rows = await event.read_shards(conn, memory.watermarks, limit=limit, upto=memory.boundary)
    memory.behind = _shards_cut_off(rows, limit)
    if not rows:
        metrics.say_current(memory.epochs)
        return 0
    changed, parked = await _fold_rows(conn, memory, rows)
    reached = _reached(rows)
    kept = await execution_projection.commit(
        conn, memory.epochs, changed=list(changed.values()), parked=parked, reached=reached
    )
    memory.remember(changed, reached)
    memory.ended_rows = [one for one in changed.values() if one.state.is_terminal]
    memory.ended = [one.state.execution_id for one in memory.ended_rows]
    memory.has_closed = any(row["event_type"] == "checkpoint.committed" for row in rows)
    await _let_go(shards, memory, memory.epochs.keys() - kept.keys())
    metrics.say_projected(kept, events=len(rows), parked=len(parked))
    return len(rows)


async def _let_go(shards: Shards, memory: Memory, lost: Collection[ShardId]) -> None:
    if lost:
        memory.drop(lost)
        await shards.lost(lost)


async def _fold_rows(
    conn: Connection, memory: Memory, rows: list[Any]
) -> tuple[dict[ExecutionId, Projected], list[Parked]]:
    rows = _passable(memory, rows)
    touched = {ExecutionId(row["execution_id"]) for row in rows}
    found = memory.recall(touched)
    unknown = touched - found.keys()
    parked: list[Parked] = []
    if unknown:
        loaded, parked = await load_rows(conn, memory, unknown, rows)
        found.update(loaded)
        rows = _passable(memory, rows)
    spoiled = _fold_trusting(found, rows)
    if not spoiled:
        return found, parked
    # A failed fold leaves its state half changed: start again from the row, which is whole.
    for execution_id in spoiled:
        found.pop(execution_id, None)
    loaded, more = await load_rows(conn, memory, spoiled, rows)
    found.update(loaded)
    spoiled -= memory.given_up.keys()
    again = [row for row in rows if row["execution_id"] in spoiled]
    return found, [*parked, *more, *_fold_carefully(found, again)]


def _passable(memory: Memory, rows: list[Any]) -> list[Any]:
    if not memory.given_up:
        return rows
    return [row for row in rows if row["execution_id"] not in memory.given_up]


def _fold_trusting(found: dict[ExecutionId, Projected], rows: Iterable[Any]) -> set[ExecutionId]:
    """Fold in place. Returns the executions in which an event could not be read or folded."""
    spoiled: set[ExecutionId] = set()
    for row in rows:
        execution_id = ExecutionId(row["execution_id"])
        try:
            if execution_id not in spoiled:
                found[execution_id] = advance(found.get(execution_id), row, event.event_of(row))
        except Exception:  # noqa: BLE001 - one bad row, whatever it is, never stops a shard
            spoiled.add(execution_id)
    return spoiled


def _fold_carefully(found: dict[ExecutionId, Projected], rows: Iterable[Any]) -> list[Parked]:
    """The same with a copy per event, so that a bad one can be left out and the rest goes on."""
    parked: list[Parked] = []
    for row in rows:
        execution_id = ExecutionId(row["execution_id"])
        before = found.get(execution_id)
        try:
            found[execution_id] = advance(copied(before), row, event.event_of(row))
        except Exception as error:  # noqa: BLE001 - it is parked with its reason
            parked.append(_park(row, error))
            log.warning(
                "event.parked",
                execution_id=execution_id,
                event_id=row["event_id"],
                error=repr(error),
            )
    return parked


def _park(row: Any, error: Exception) -> Parked:
    return Parked(
        shard_id=ShardId(row["shard_id"]),
        execution_id=ExecutionId(row["execution_id"]),
        body=msgspec.json.encode(dict(row)),
        reason=f"{type(error).__name__}: {error}",
    )


def _reached(rows: Iterable[Any]) -> dict[ShardId, Reached]:
    return {r["shard_id"]: Reached(EventId(r["event_id"]), r["created_at"]) for r in rows}


def _shards_cut_off(rows: Iterable[Any], limit: int) -> int:
    counts: dict[int, int] = {}
    for row in rows:
        counts[row["shard_id"]] = counts.get(row["shard_id"], 0) + 1
    return sum(1 for count in counts.values() if count >= limit)
