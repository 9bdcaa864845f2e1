"""store/execution_shard.py: leases of shards and their fencing token."""

import asyncio

from noetl_core.domain.ids import RuntimeId
from noetl_core.store.execution_shard import Claim, claim
from noetl_core.store.postgres import Pool

SHARD_COUNT = 16


async def take(
    pool: Pool, owner: int, *, limit: int = 100, lease_seconds: float = 30
) -> list[Claim]:
    return await claim(
        pool,
        "broker",
        RuntimeId(owner),
        instance=f"broker-{owner}",
        lease_seconds=lease_seconds,
        limit=limit,
    )


async def test_two_claimers_never_get_the_same_shard(pool: Pool) -> None:
    first, second = await asyncio.gather(take(pool, 1, limit=8), take(pool, 2))

    assert not {c.shard_id for c in first} & {c.shard_id for c in second}
