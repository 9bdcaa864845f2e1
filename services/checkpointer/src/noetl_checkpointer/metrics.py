"""What the checkpointer measures."""

import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from opentelemetry.metrics import CallbackOptions, Observation

from noetl_core.domain.ids import ShardId
from noetl_core.process.telemetry import meter

_meter = meter("checkpointer")

SILENT_SECONDS = 3.0
"""Who could not look for so long does not know that nothing has grown older meanwhile."""


class _Look(NamedTuple):
    age_ms: float
    at: float


_looks: dict[ShardId, _Look] = {}


def _observed(_: CallbackOptions) -> Iterable[Observation]:
    now = time.monotonic()
    for shard, look in list(_looks.items()):
        silent = now - look.at
        late_ms = silent * 1000 if silent > SILENT_SECONDS else 0.0
        yield Observation(look.age_ms + late_ms, {"shard": shard})


_meter.create_observable_gauge(
    "noetl_checkpoint_age_ms",
    [_observed],
    unit="ms",
    description="How long a shard has worked past its last recorded epoch; 0 when it is quiet. "
    "It grows while nobody can look.",
)
BARRIERS = _meter.create_counter(
    "noetl_checkpoint_barriers", description="Barriers sent, by outcome (sent, lost)."
)
RECORDED = _meter.create_counter(
    "noetl_checkpoint_executions", description="Executions whose epoch was recorded."
)


def show_ages(shards: Iterable[ShardId], ages_ms: Mapping[ShardId, float]) -> None:
    """Of these shards and no others: while another one leads we have nothing to tell."""
    now = time.monotonic()
    _looks.clear()
    _looks.update({shard: _Look(ages_ms.get(shard, 0.0), now) for shard in shards})
