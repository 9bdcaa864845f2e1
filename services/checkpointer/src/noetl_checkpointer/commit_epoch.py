"""The turns of the checkpointer: close the epochs of busy shards, record those that are committed.

    close_epoch    Barrier ──> broker ── checkpoint.committed for every execution that moved
    commit_epoch   noetl.event, up to the projection's watermark ──> noetl.checkpoint

A recorded epoch is in the log and in the projection: a recovery has nothing to replay before it.
Correctness never rests on it, so a lost barrier, or a checkpointer that is down, only means that
the last recorded epoch is older.
"""

import asyncio
from collections.abc import Callable, Iterable

import structlog

from noetl_checkpointer import metrics
from noetl_core.bus.connection import Bus
from noetl_core.domain.ids import EpochId, EventId, ShardId
from noetl_core.store import checkpoint, projection_checkpoint, setting
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Barrier, encode_messages
from noetl_core.wire.subjects import event_batch

EPOCHS_KEPT = 2

log = structlog.get_logger()


class Progress:
    """Where the checkpointer stands. Losing it costs a second look at what is done already."""

    def __init__(self) -> None:
        self.closed: dict[ShardId, EventId] = {}
        """The projection's watermark when the shard's last barrier was sent."""
        self.searched: dict[ShardId, EventId] = {}
        """The last event that was searched for a closed epoch."""


async def close_epoch(
    pool: Pool, bus: Bus, progress: Progress, *, mint: Callable[[], int]
) -> EpochId | None:
    """One turn: a barrier to every shard that moved since its last one. None when all are quiet."""
    watermarks = await projection_checkpoint.watermarks(pool, await _shards(pool))
    moved = {s: to for s, to in watermarks.items() if to > progress.closed.get(s, 0)}
    if not moved:
        return None
    epoch = EpochId(mint())
    stored = await asyncio.gather(*(_send(bus, shard, epoch) for shard in moved))
    for shard, is_stored in zip(moved, stored, strict=True):
        # A barrier that NATS did not take is sent again with the next epoch.
        if is_stored:
            progress.closed[shard] = moved[shard]
    metrics.BARRIERS.add(sum(stored), {"outcome": "stored"})
    metrics.BARRIERS.add(len(stored) - sum(stored), {"outcome": "lost"})
    return epoch


async def _send(bus: Bus, shard: ShardId, epoch: EpochId) -> bool:
    body = encode_messages([Barrier(shard_id=shard, epoch=epoch)])
    return await bus.publish(event_batch(shard), body)


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
    metrics.show_ages(shards, await checkpoint.ages_ms(pool, shards))
    return len(recorded.executions)


async def _shards(pool: Pool) -> Iterable[ShardId]:
    return [ShardId(number) for number in range(await setting.shard_count(pool))]
