"""The turns of the checkpointer: close the epochs of busy shards, record those that are committed.

    close_epoch    Barrier ──> brokers ── checkpoint.committed for every execution that moved
    commit_epoch   noetl.event, up to the projection's watermark ──> noetl.checkpoint

A recorded epoch is in the log and in the projection: a recovery has nothing to replay before it.
Correctness never rests on it, so a lost barrier, or a checkpointer that is down, only means that
the last recorded epoch is older.
"""

from collections.abc import Callable, Sequence

import structlog

from noetl_checkpointer import metrics
from noetl_core.bus.connection import Bus
from noetl_core.domain.ids import EpochId, EventId, ShardId
from noetl_core.domain.sharding import shard_of
from noetl_core.store import checkpoint, event, setting
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Barrier, encode_messages
from noetl_core.wire.subjects import EPOCHS_CLOSE

EPOCHS_KEPT = 2
SEND_AGAIN_MS = 5000.0
"""A shard that works for so long past its last epoch has missed its barrier."""
AGED_EVENTS_MAX = 5000
"""Events of a shard that are looked at in one turn for the first that no epoch covers."""
SWEPT_ROWS_MAX = 2000
"""Recorded epochs that are looked at in one turn for executions that have ended."""

log = structlog.get_logger()


class Progress:
    """Where the checkpointer stands. Losing it costs a second look at what is done already."""

    def __init__(self) -> None:
        self.floor: EpochId | None = None
        """The highest epoch of those who led before us. The next one is above it, or brokers would
        take it for one that they have closed."""
        self.closed: dict[ShardId, EventId] = {}
        """The shard's newest event when its last barrier was sent."""
        self.missed: set[ShardId] = set()
        """Shards that get a barrier though nothing moved in them."""
        self.searched: dict[ShardId, EventId] = {}
        """Up to which event closed epochs were searched for."""
        self.passed: dict[ShardId, EventId] = {}
        """Up to which event nothing goes on that no epoch covers."""
        self.swept = checkpoint.BEFORE_ALL


async def close_epoch(
    pool: Pool, bus: Bus, progress: Progress, *, mint_above: Callable[[int], int]
) -> EpochId | None:
    """One turn: a barrier to every shard that moved since its last one. None when all are quiet."""
    shards = await _shards(pool)
    if progress.floor is None:
        progress.floor = await checkpoint.newest_epoch(pool, shards)
    # By the log, not by the projection: one that is behind must not put off the next epoch, too.
    newest = await event.newest_events(pool, shards)
    moved = {s: to.event_id for s, to in newest.items() if to.event_id > progress.closed.get(s, 0)}
    asked = moved.keys() | progress.missed
    if not asked:
        return None
    # A broker may know of an epoch that closed nothing: it is in the events that came after.
    epoch = EpochId(mint_above(max(progress.floor, *(to.epoch for to in newest.values()))))
    # To whoever listens now: what waits in a stream behind a backlog would close nothing in time.
    # A barrier that is lost is sent again with the next epoch, at the latest when the age shows it.
    is_sent = bus.is_connected
    await bus.wake(EPOCHS_CLOSE, encode_messages([_barrier(shard, epoch) for shard in asked]))
    if is_sent:
        progress.closed.update(moved)
        progress.missed.clear()
    metrics.BARRIERS.add(len(asked), {"outcome": "sent" if is_sent else "lost"})
    return epoch


def _barrier(shard: ShardId, epoch: EpochId) -> Barrier:
    return Barrier(shard_id=shard, epoch=epoch)


async def commit_epoch(pool: Pool, progress: Progress, *, batch_size: int) -> int:
    """One turn: record the closed epochs that the projection has passed. Says of how many."""
    shards = await _shards(pool)
    unknown = set(shards) - progress.searched.keys()
    if unknown:
        progress.searched.update(await checkpoint.resume(pool, unknown))
    recorded = await checkpoint.record(pool, progress.searched, limit=batch_size)
    progress.searched.update(recorded.searched)
    if recorded.executions:
        await checkpoint.prune(pool, recorded.executions, keep=EPOCHS_KEPT)
        metrics.RECORDED.add(len(recorded.executions))
        log.debug("epoch.recorded", executions=len(recorded.executions))
    return len(recorded.executions)


async def watch_ages(pool: Pool, progress: Progress) -> None:
    """One turn: show how long each shard has worked past its last epoch."""
    shards = await _shards(pool)
    places = {shard: progress.passed.get(shard, EventId(0)) for shard in shards}
    found = await checkpoint.ages(pool, places, limit=AGED_EVENTS_MAX)
    progress.passed.update(found.passed)
    late = [shard for shard, age_ms in found.ages_ms.items() if age_ms > SEND_AGAIN_MS]
    # Whoever moved there may be on another shard since their count changed: that one closes it.
    progress.missed = {shard_of(found.oldest[s], shard_count=len(shards)) for s in late}
    metrics.show_ages(shards, found.ages_ms)


async def forget_ended(pool: Pool, progress: Progress) -> int:
    """One turn: the epochs of executions that have ended serve nobody. Says how many went."""
    swept = await checkpoint.forget_ended(pool, progress.swept, limit=SWEPT_ROWS_MAX)
    progress.swept = swept.upto
    return swept.row_count


async def _shards(pool: Pool) -> Sequence[ShardId]:
    return [ShardId(number) for number in range(await setting.shard_count(pool))]
