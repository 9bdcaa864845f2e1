"""What the projection measures."""

import time
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from opentelemetry.metrics import CallbackOptions, Observation

from noetl_core.domain.ids import ShardId
from noetl_core.process.telemetry import meter

_meter = meter("projection")

SILENT_SECONDS = 2.0
"""A shard that was not looked at for so long is behind, whatever was true then."""


class _Look(NamedTuple):
    lag_ms: float
    at: float


_looks: dict[ShardId, _Look] = {}


def _lags(_: CallbackOptions) -> Iterable[Observation]:
    now = time.monotonic()
    for shard, look in list(_looks.items()):
        silent = now - look.at
        late_ms = silent * 1000 if silent > SILENT_SECONDS else 0.0
        yield Observation(look.lag_ms + late_ms, {"shard": shard})


_meter.create_observable_gauge(
    "noetl_projection_lag_ms",
    [_lags],
    unit="ms",
    description="Age of the newest event when it was projected, by shard; 0 when all are. It grows "
    "while nothing can be projected.",
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


def say_claimed(shards: Collection[ShardId]) -> None:
    """Of these we have to tell, and of no others any more."""
    for shard in _looks.keys() - set(shards):
        del _looks[shard]
    for shard in shards:
        _looks.setdefault(shard, _Look(0.0, time.monotonic()))


def say_current(shards: Iterable[ShardId]) -> None:
    """There is nothing past the watermark of these shards."""
    _looks.update({shard: _Look(0.0, time.monotonic()) for shard in shards})


def say_projected(lags_ms: Mapping[ShardId, int], *, events: int, parked: int) -> None:
    now = time.monotonic()
    _looks.update({shard: _Look(lag_ms, now) for shard, lag_ms in lags_ms.items()})
    EVENTS.add(events)
    if parked:
        PARKED.add(parked)
