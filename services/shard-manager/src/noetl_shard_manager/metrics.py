"""What the shard-manager measures."""

from collections import Counter
from collections.abc import Iterable

from opentelemetry.metrics import CallbackOptions, Observation

from noetl_core.process.telemetry import meter
from noetl_core.wire.topology import Topology

_meter = meter("shard-manager")

SHARD_MOVES = _meter.create_counter(
    "noetl_shard_moves", description="Shards that got another owner, by role."
)

_unowned: dict[str, int] = {}
_members: dict[tuple[str, str], int] = {}


def show(topology: Topology) -> None:
    """As it was seen last. What is not there any more shows a zero."""
    unowned = Counter(one.role for one in topology.shards if one.instance is None)
    for role in {*_unowned, *(one.role for one in topology.shards)}:
        _unowned[role] = unowned[role]
    members = Counter((one.kind, one.status) for one in topology.members)
    for seen in {*_members, *members}:
        _members[seen] = members[seen]


def show_nothing() -> None:
    """Somebody else leads and looks: what was seen here is of the past."""
    _unowned.clear()
    _members.clear()


def _without_owner(_: CallbackOptions) -> Iterable[Observation]:
    for role, count in list(_unowned.items()):
        yield Observation(count, {"role": role})


def _registered(_: CallbackOptions) -> Iterable[Observation]:
    for (kind, status), count in list(_members.items()):
        yield Observation(count, {"kind": kind, "status": status})


_meter.create_observable_gauge(
    "noetl_shards_unowned",
    [_without_owner],
    description="Shards without a living owner, by role.",
)
_meter.create_observable_gauge(
    "noetl_runtime_members",
    [_registered],
    description="Registered processes, by kind and status.",
)
