"""What the former owner of a shard had in memory, and its successor finds in the log.

A barrier closes an epoch over whatever moved since the last one, and that is in the memory of
whoever moved it. What a broker recorded in its last second would have no epoch until something else
happens to the same execution: for an approval, hours later.
"""

from collections.abc import Sequence
from typing import NamedTuple

from noetl_core.domain.ids import EpochId, ExecutionId, ShardId
from noetl_core.store import checkpoint
from noetl_core.store.postgres import Pool
from noetl_core.store.resize import Generation

EVENTS_MAX = 1000
"""The last events of a shard that are looked at: more than a broker records between two barriers.
Whoever moved before them and was not marked, because no barrier came for long, is not marked."""


class Left(NamedTuple):
    """Of one shard."""

    epoch: EpochId | None = None
    """The epoch that its log stands in; None while it never had any."""
    unmarked: frozenset[ExecutionId] = frozenset()
    """Who moved past the last recorded epoch: the next barrier marks them."""


async def look_back(
    pool: Pool, shards: Sequence[ShardId], generation: Generation
) -> dict[ShardId, Left]:
    """Of every one of these shards, which are ours by now: what is read here does not change."""
    epochs = await checkpoint.closed_last(pool, shards)
    unmarked = await checkpoint.left_open(pool, shards, generation, limit=EVENTS_MAX)
    return {s: Left(epochs.get(s), frozenset(unmarked.get(s, ()))) for s in shards}
