"""What the compactor measures."""

from collections.abc import Iterable, Mapping

from opentelemetry.metrics import CallbackOptions, Observation

from noetl_core.process.telemetry import meter

_meter = meter("compactor")

PARTITIONS_CREATED = _meter.create_counter(
    "noetl_compactor_partitions_created", description="Partitions made ahead of time."
)

_partitions_missing: dict[str, int] = {}


def show_missing(counts: Mapping[str, int]) -> None:
    """By outcome, of the last turn."""
    _partitions_missing.clear()
    _partitions_missing.update(counts)


def _missing(_: CallbackOptions) -> Iterable[Observation]:
    for outcome, count in list(_partitions_missing.items()):
        yield Observation(count, {"outcome": outcome})


_meter.create_observable_gauge(
    "noetl_compactor_partitions_missing",
    [_missing],
    description="Partitions of this and the coming weeks that could not be made, by outcome.",
)

_partitions: list[int] = []


def show_partitions(count: int) -> None:
    _partitions[:] = [count]


def _count(_: CallbackOptions) -> Iterable[Observation]:
    return [Observation(count) for count in list(_partitions)]


_meter.create_observable_gauge(
    "noetl_compactor_partitions",
    [_count],
    description="Partitions of the log: every statement that looks at all of them locks each.",
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

_events_per_second: dict[int, float] = {}


def show_rate(rates: Mapping[int, float]) -> None:
    """By shard, of the last archive; a shard that had no part in it has none."""
    _events_per_second.clear()
    _events_per_second.update(rates)


def _rate(_: CallbackOptions) -> Iterable[Observation]:
    for shard, rate in list(_events_per_second.items()):
        yield Observation(rate, {"shard": shard})


_meter.create_observable_gauge(
    "noetl_compactor_events_per_second",
    [_rate],
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


def show_nothing() -> None:
    """Somebody else leads: what was seen here is of the past."""
    _partitions_missing.clear()
    _partitions.clear()
    _events_per_second.clear()
