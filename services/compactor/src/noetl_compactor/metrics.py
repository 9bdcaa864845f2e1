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
EVENTS_ARCHIVED = _meter.create_counter(
    "noetl_compactor_events_archived", description="Events written to archives and verified."
)
ARCHIVES_FAILED = _meter.create_counter(
    "noetl_compactor_archives_failed",
    description="Archives that could not be written or did not give back what was written.",
)
PLACE_AWAY = _meter.create_counter(
    "noetl_compactor_place_away",
    description="Turns that ended early because the place of archives did not answer.",
)
EVENTS_PER_SECOND = _meter.create_gauge(
    "noetl_compactor_events_per_second",
    unit="1/s",
    description="Events archived per second by the last archive, by shard; the shards share one "
    "compactor, and results and checks are included.",
)
DROPS = _meter.create_counter(
    "noetl_compactor_drops",
    description="Attempts to drop what is archived, by outcome: dropped, busy, changed.",
)
RESULTS_EXPIRED = _meter.create_counter(
    "noetl_compactor_results_expired", description="Results removed because their time was over."
)
