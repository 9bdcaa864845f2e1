"""What the worker measures: plain numbers, read when somebody asks."""

from collections.abc import Callable, Iterable
from typing import Protocol

from opentelemetry.metrics import CallbackOptions, Observation

from noetl_core.process.telemetry import meter

_meter = meter("worker")


class Holding(Protocol):
    running: int
    unconfirmed: int


class Tally:
    """The counts of this process since its start."""

    def __init__(self) -> None:
        self.leased = 0
        self.done = 0
        self.failed = 0
        self.parked = 0
        self.busy_ms = 0.0
        self.nats_batches = 0
        self.inbox_batches = 0
        self.repeated = 0
        self.stopped = 0
        self.held: Holding | None = None


TALLY = Tally()


def _reading(value: Callable[[], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    return lambda _: (Observation(value()),)


def _outcomes(_: CallbackOptions) -> Iterable[Observation]:
    yield Observation(TALLY.done, {"outcome": "ok"})
    yield Observation(TALLY.failed, {"outcome": "error"})
    yield Observation(TALLY.parked, {"outcome": "parked"})


_meter.create_observable_counter(
    "noetl_worker_leased_commands",
    [_reading(lambda: TALLY.leased)],
    description="Commands leased.",
)
_meter.create_observable_counter(
    "noetl_worker_commands", [_outcomes], description="Commands that ended here, by outcome."
)
_meter.create_observable_counter(
    "noetl_worker_busy_seconds",
    [_reading(lambda: TALLY.busy_ms / 1000)],
    unit="s",
    description="Time spent in commands, summed over slots.",
)
_meter.create_observable_counter(
    "noetl_worker_nats_batches",
    [_reading(lambda: TALLY.nats_batches)],
    description="Messages that reached the brokers through NATS.",
)
_meter.create_observable_counter(
    "noetl_worker_inbox_batches",
    [_reading(lambda: TALLY.inbox_batches)],
    description="Messages that took the inbox: NATS was away, or they were too large for it.",
)
_meter.create_observable_counter(
    "noetl_worker_repeated_results",
    [_reading(lambda: TALLY.repeated)],
    description="Results sent again for want of confirmation.",
)
_meter.create_observable_counter(
    "noetl_worker_stopped_commands",
    [_reading(lambda: TALLY.stopped)],
    description="Commands stopped because their row was gone.",
)
_meter.create_observable_gauge(
    "noetl_worker_running_commands",
    [_reading(lambda: TALLY.held.running if TALLY.held else 0)],
    description="Slots in use.",
)
_meter.create_observable_gauge(
    "noetl_worker_unconfirmed_results",
    [_reading(lambda: TALLY.held.unconfirmed if TALLY.held else 0)],
    description="Results that were sent and are not known to be recorded.",
)
