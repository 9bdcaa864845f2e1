"""What the reaper measures."""

from collections.abc import Iterable, Mapping

from opentelemetry.metrics import CallbackOptions, Observation

from noetl_core.process.telemetry import meter

_meter = meter("reaper")

REPORTS = _meter.create_counter(
    "noetl_reaper_reports",
    description=(
        "What was reported to the broker, by kind (expired, idle, due) and road (nats, inbox)."
    ),
)

_queue: dict[tuple[str, str], int] = {}


def show_queue(depth: Mapping[tuple[str, str], int]) -> None:
    """What was counted last; of nothing when somebody else counts."""
    _queue.clear()
    _queue.update(depth)


def _depth(_: CallbackOptions) -> Iterable[Observation]:
    for (pool, status), count in list(_queue.items()):
        yield Observation(count, {"pool": pool, "status": status})


_meter.create_observable_gauge(
    "noetl_queue_commands",
    [_depth],
    description="Open commands, by pool and status (pending, leased): what workers have to do.",
)
