"""What the compactor measures."""

from noetl_core.process.telemetry import meter

_meter = meter("compactor")

PARTITIONS_CREATED = _meter.create_counter(
    "noetl_compactor_partitions_created", description="Partitions made ahead of time."
)
PARTITIONS_MISSING = _meter.create_gauge(
    "noetl_compactor_partitions_missing",
    description="Partitions of this and the coming weeks that could not be made, by outcome.",
)
