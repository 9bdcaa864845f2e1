"""The turn of the shard-manager: rows for every shard, and the shape of the system told.

Shards are claimed, renewed and taken over by their owners (process/ownership.py), so everything
goes on while this service is down; what it does is to keep the books and to tell who looks.
"""

import structlog

from noetl_core.bus.connection import Bus
from noetl_core.domain.ids import ShardId
from noetl_core.store import topology
from noetl_core.store.postgres import Pool
from noetl_core.wire.subjects import TOPOLOGY
from noetl_core.wire.topology import Topology, encode_topology
from noetl_shard_manager import metrics

log = structlog.get_logger()


class Known:
    """What was seen last, so that only changes are told."""

    def __init__(self) -> None:
        self.seen: Topology | None = None
        self.published: Topology | None = None


async def assign(pool: Pool, bus: Bus, known: Known) -> Topology:
    """One turn. Returns the shape of the system as it is now."""
    added = await topology.ensure_shards(pool)
    if added:
        log.info("shards.added", rows=added)
    now = await topology.read(pool)
    if known.seen is not None:
        _tell_moves(known.seen, now)
    known.seen = now
    metrics.show(now)
    # What changed while NATS was away is told when it is back.
    if now != known.published and bus.is_connected:
        await bus.wake(TOPOLOGY, encode_topology(now))
        known.published = now
    return now


def _tell_moves(before: Topology, now: Topology) -> None:
    owners = {(one.role, one.shard_id): one.instance for one in before.shards}
    moves: dict[tuple[str, str | None, str | None], list[ShardId]] = {}
    for one in now.shards:
        last = owners.get((one.role, one.shard_id))
        if last != one.instance:
            moves.setdefault((one.role, last, one.instance), []).append(one.shard_id)
            metrics.SHARD_MOVES.add(1, {"role": one.role})
    for (role, last, new), shard_ids in moves.items():
        log.info(
            "shards.moved", role=role, from_instance=last, to_instance=new, shard_ids=shard_ids
        )
