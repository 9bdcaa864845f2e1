"""What the checkpointer measures."""

from collections.abc import Iterable, Mapping

from noetl_core.domain.ids import ShardId
from noetl_core.process.telemetry import meter

_meter = meter("checkpointer")

AGE_MS = _meter.create_gauge(
    "noetl_checkpoint_age_ms",
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
    for shard in shards:
        AGE_MS.set(ages_ms.get(shard, 0.0), {"shard": shard})
