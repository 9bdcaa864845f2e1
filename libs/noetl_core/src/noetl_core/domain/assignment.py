"""Who shall own which shard. Pure.

    16 shards, owners {a: 6, b: 6, c: 4}, d joins  ->  a and b give two each, everybody has four

Fair: no two members differ by more than one. Sticky: whoever holds a shard keeps it unless it holds
too many. Minimal: no other fair assignment moves fewer shards.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from noetl_core.domain.ids import RuntimeId, ShardId


class Move(NamedTuple):
    """`giver` is None for a shard that nobody holds."""

    shard_id: ShardId
    giver: RuntimeId | None
    taker: RuntimeId


def moves(
    owners: Mapping[ShardId, RuntimeId | None], members: Collection[RuntimeId]
) -> tuple[Move, ...]:
    """The fewest moves after which living members share all shards fairly, by shard."""
    if not members:
        return ()
    held = _held(owners, members)
    quotas = _quotas(held, shard_count=len(owners))
    free = [shard for shard, owner in owners.items() if owner not in held]
    for member, shards in held.items():
        free += shards[quotas[member] :]
    takers = (m for m, own in held.items() for _ in range(quotas[m] - len(own)))
    return tuple(
        Move(shard, owners[shard] if owners[shard] in held else None, taker)
        for shard, taker in zip(sorted(free), takers, strict=True)
    )


def fair_share_max(*, shards: int, members: int) -> int:
    """What no member needs to exceed, whoever gets the ones left over."""
    return -(-shards // max(1, members))


def _held(
    owners: Mapping[ShardId, RuntimeId | None], members: Iterable[RuntimeId]
) -> dict[RuntimeId, list[ShardId]]:
    """Members in the order of their ids, each with its shards in order."""
    held: dict[RuntimeId, list[ShardId]] = {member: [] for member in sorted(members)}
    for shard in sorted(owners):
        owner = owners[shard]
        if owner in held:
            held[owner].append(shard)
    return held


def _quotas(
    held: Mapping[RuntimeId, Collection[ShardId]], *, shard_count: int
) -> dict[RuntimeId, int]:
    """Whoever holds the most gets what is left over: any other choice would move a shard more."""
    share, left_over = divmod(shard_count, len(held))
    by_size = sorted(held, key=lambda member: (-len(held[member]), member))
    return {member: share + (place < left_over) for place, member in enumerate(by_size)}
