"""What the checkpointer measures."""

from collections.abc import Iterable, Mapping

from opentelemetry.metrics import CallbackOptions, Observation

from noetl_core.domain.ids import ShardId
from noetl_core.process.telemetry import meter

_meter = meter("checkpointer")

_ages_ms: dict[ShardId, float] = {}


def _observed(_: CallbackOptions) -> Iterable[Observation]:
    for shard, age_ms in list(_ages_ms.items()):
        yield Observation(age_ms, {"shard": shard})


_meter.create_observable_gauge(
    "noetl_checkpoint_age_ms",
    [_observed],
    unit="ms",
    description="How long a shard has worked past its last recorded epoch; 0 when it is quiet.",
)
BARRIERS = _meter.create_counter(
    "noetl_checkpoint_barriers", description="Barriers sent, by outcome (sent, lost)."
)
RECORDED = _meter.create_counter(
    "noetl_checkpoint_executions", description="Executions whose epoch was recorded."
)


def show_ages(shards: Iterable[ShardId], ages_ms: Mapping[ShardId, float]) -> None:
    """Of these shards and no others: who does not lead has nothing to tell."""
    _ages_ms.clear()
    _ages_ms.update({shard: ages_ms.get(shard, 0.0) for shard in shards})
