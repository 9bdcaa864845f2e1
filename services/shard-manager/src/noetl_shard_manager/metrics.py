"""What the shard-manager measures."""

from collections import Counter

from noetl_core.process.telemetry import meter
from noetl_core.wire.topology import Topology

_meter = meter("shard-manager")

SHARDS_UNOWNED = _meter.create_gauge(
    "noetl_shards_unowned", description="Shards without a living owner, by role."
)
SHARD_MOVES = _meter.create_counter(
    "noetl_shard_moves", description="Shards that got another owner, by role."
)
MEMBERS = _meter.create_gauge(
    "noetl_runtime_members", description="Registered processes, by kind and status."
)


class Gauges:
    """Sets what is there, and zeroes what was there before."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()

    def show(self, topology: Topology) -> None:
        roles = {one.role for one in topology.shards}
        unowned = Counter(one.role for one in topology.shards if one.instance is None)
        for role in roles:
            SHARDS_UNOWNED.set(unowned[role], {"role": role})
        members = Counter((one.kind, one.status) for one in topology.members)
        self._seen |= members.keys()
        for kind, status in self._seen:
            MEMBERS.set(members[kind, status], {"kind": kind, "status": status})
