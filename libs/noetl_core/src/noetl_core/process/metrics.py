"""What every process measures of itself."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry.metrics import CallbackOptions, Observation

from noetl_core.domain.ids import ShardId
from noetl_core.process.telemetry import meter

_meter = meter("process")

HEARTBEATS = _meter.create_counter(
    "noetl_heartbeats", description="Heartbeats of processes, by kind and outcome (ok, error)."
)
HEARTBEAT_MS = _meter.create_histogram(
    "noetl_heartbeat_ms", unit="ms", description="Time of a heartbeat, by kind."
)
TURN_MS = _meter.create_histogram(
    "noetl_turn_ms",
    unit="ms",
    description="Time of one turn of a loop that runs now and then, by loop: a sweep, an audit.",
)

_owners: dict[tuple[str, str], Callable[[], Mapping[ShardId, int]]] = {}


def show_shards(role: str, instance: str, held: Callable[[], Mapping[ShardId, int]]) -> None:
    """From here on this process says which shards of the role it holds."""
    _owners[role, instance] = held


def _held(_: CallbackOptions) -> Iterable[Observation]:
    # Copies: somebody may ask from another thread.
    for (role, instance), held in list(_owners.items()):
        for shard in dict(held()):
            yield Observation(1, {"role": role, "shard": shard, "instance": instance})


_meter.create_observable_gauge(
    "noetl_shard_owner",
    [_held],
    description="1 for every shard that a process holds, by role, shard and instance.",
)


@contextmanager
def measured_heartbeat(kind: str) -> Iterator[None]:
    begun = time.perf_counter()
    outcome = "error"
    try:
        yield
        outcome = "ok"
    finally:
        HEARTBEATS.add(1, {"kind": kind, "outcome": outcome})
        HEARTBEAT_MS.record((time.perf_counter() - begun) * 1000, {"kind": kind})
