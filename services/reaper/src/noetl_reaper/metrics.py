"""What the reaper measures."""

from collections.abc import Iterable, Mapping

from opentelemetry.metrics import CallbackOptions, Observation

from noetl_core.process.telemetry import meter

_meter = meter("reaper")

REPORTS = _meter.create_counter(
    "noetl_reaper_reports",
    description=(
        "What was reported to the broker, by kind (expired, idle, lost, due) and road (nats, "
        "inbox)."
    ),
)

_queue: dict[tuple[str, str], int] = {}


def show_queue(depth: Mapping[tuple[str, str], int]) -> None:
    """As counted last. What is empty by now shows a zero: an alert on it must see that."""
    for known in _queue:
        _queue[known] = 0
    _queue.update(depth)


def show_nothing() -> None:
    """Somebody else leads and counts: what was counted here is of the past."""
    _queue.clear()
    _dead_letters.clear()


def _depth(_: CallbackOptions) -> Iterable[Observation]:
    for (pool, status), count in list(_queue.items()):
        yield Observation(count, {"pool": pool, "status": status})


_meter.create_observable_gauge(
    "noetl_queue_commands",
    [_depth],
    description="Open commands, by pool and status: workers have to do what is pending or leased; "
    "what is held belongs to executions that are paused.",
)

_dead_letters: dict[str, int] = {}
_STUCK = "reaper"


def show_dead_letters(counts: Mapping[str, int]) -> None:
    """By source, as counted last. A source that has none any more shows a zero."""
    for source in (_STUCK, *_dead_letters):
        _dead_letters[source] = 0
    _dead_letters.update(counts)


def _set_aside(_: CallbackOptions) -> Iterable[Observation]:
    for source, count in list(_dead_letters.items()):
        yield Observation(count, {"source": source})


def _stuck(_: CallbackOptions) -> Iterable[Observation]:
    if _STUCK in _dead_letters:
        yield Observation(_dead_letters[_STUCK])


_meter.create_observable_gauge(
    "noetl_dead_letters",
    [_set_aside],
    description="What was set aside and not dealt with yet, by source.",
)
_meter.create_observable_gauge(
    "noetl_executions_stuck",
    [_stuck],
    description="Running executions that nothing can move, as the reaper has flagged them.",
)
