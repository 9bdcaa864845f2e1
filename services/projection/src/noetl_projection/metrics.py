"""What the projection measures."""

from collections.abc import Iterable, Mapping

from noetl_core.domain.ids import ShardId
from noetl_core.process.telemetry import meter

_meter = meter("projection")

LAG_MS = _meter.create_gauge(
    "noetl_projection_lag_ms",
    unit="ms",
    description="Age of the newest event when it was projected, by shard; 0 when all are.",
)
EVENTS = _meter.create_counter(
    "noetl_projection_events", description="Events folded into the status rows."
)
PARKED = _meter.create_counter(
    "noetl_projection_parked_events", description="Events that could not be folded and were parked."
)
UNREADABLE = _meter.create_counter(
    "noetl_projection_unreadable_rows",
    description="Rows that could not be read, by outcome (refolded, given_up).",
)
AUDITED = _meter.create_counter(
    "noetl_projection_audited_executions",
    description="Executions that were folded again and compared with their row.",
)
DIFFERED = _meter.create_counter(
    "noetl_projection_differences",
    description="Rows that were not what their events say; they were written anew.",
)


def say_current(shards: Iterable[ShardId]) -> None:
    """There is nothing past the watermark of these shards."""
    for shard in shards:
        LAG_MS.set(0, {"shard": shard})


def say_projected(lags_ms: Mapping[ShardId, int], *, events: int, parked: int) -> None:
    for shard, lag_ms in lags_ms.items():
        LAG_MS.set(lag_ms, {"shard": shard})
    EVENTS.add(events)
    if parked:
        PARKED.add(parked)
