"""Says who shall have which shard; owners let go and claim by themselves (process/ownership.py)."""

import structlog

from noetl_core.bus.connection import Bus
from noetl_core.domain.assignment import moves
from noetl_core.domain.ids import RuntimeId, ShardId
from noetl_core.store import execution_shard, topology
from noetl_core.store.execution_shard import ROLES, ShardRow
from noetl_core.store.postgres import Pool
from noetl_core.wire.subjects import shards_wake

log = structlog.get_logger()


async def balance(pool: Pool, bus: Bus) -> None:
    """One turn: write down the fewest moves to a fair share, and tell whom they concern."""
    for role in ROLES:
        rows = await execution_shard.look(pool, role)
        # Whoever let a lease run out may be dead, whatever its last heartbeat says.
        lapsed = {row.owner for row in rows if not row.is_leased}
        living = [one for one in await topology.living(pool, kind=role) if one not in lapsed]
        wishes = _changed_wishes(rows, living)
        if wishes:
            await execution_shard.want(pool, role, wishes)
            await bus.wake(shards_wake(role))
            log.info("shards.wanted", role=role, shard_ids=[s for s, to in wishes.items() if to])


def _changed_wishes(
    rows: list[ShardRow], living: list[RuntimeId]
) -> dict[ShardId, RuntimeId | None]:
    plan: dict[ShardId, RuntimeId] = {}
    for kind in execution_shard.parted(rows):
        owners = {row.shard_id: row.owner if row.is_leased else None for row in kind}
        plan |= {move.shard_id: move.taker for move in moves(owners, living)}
    return {
        row.shard_id: plan.get(row.shard_id) for row in rows if row.wanted != plan.get(row.shard_id)
    }
