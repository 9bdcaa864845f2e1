"""What the worker measures: plain numbers, read when somebody asks. A command costs little."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from opentelemetry.metrics import CallbackOptions, Observation

from noetl_core.process.telemetry import meter

_meter = meter("worker")


class Tally:
    """Counts of one worker since its start."""

    __slots__ = ("batches", "busy_ms", "ended", "inboxed", "leased", "repeated", "stopped")

    def __init__(self) -> None:
        self.leased = 0
        self.ended = {"ok": 0, "error": 0}
        self.busy_ms = 0.0
        self.batches = 0
        self.inboxed = 0
        self.repeated = 0
        self.stopped = 0


class _Metric(NamedTuple):
    name: str
    description: str
    read: Callable[[Tally], float]
    unit: str = ""


_COUNTERS = (
    _Metric("noetl_worker_leased_commands", "Commands leased.", lambda t: t.leased),
    _Metric(
        "noetl_worker_busy_seconds",
        "Time spent in commands, summed over slots.",
        lambda t: t.busy_ms / 1000,
        unit="s",
    ),
    _Metric("noetl_worker_nats_batches", "Messages sent to brokers.", lambda t: t.batches),
    _Metric(
        "noetl_worker_inbox_batches",
        "Messages that went through the inbox, because NATS was away or they were too large.",
        lambda t: t.inboxed,
    ),
    _Metric(
        "noetl_worker_repeated_results",
        "Results sent again for want of confirmation.",
        lambda t: t.repeated,
    ),
    _Metric(
        "noetl_worker_stopped_commands",
        "Commands stopped because their row was gone.",
        lambda t: t.stopped,
    ),
)


def watch(tally: Tally, running: Callable[[], int], unconfirmed: Callable[[], int]) -> None:
    for metric in _COUNTERS:
        _meter.create_observable_counter(
            metric.name,
            [_reader(lambda read=metric.read: read(tally))],  # type: ignore[misc]
            unit=metric.unit,
            description=metric.description,
        )
    _meter.create_observable_counter(
        "noetl_worker_commands",
        [lambda _: [Observation(n, {"outcome": name}) for name, n in tally.ended.items()]],
        description="Commands that ended here, by outcome.",
    )
    _meter.create_observable_gauge(
        "noetl_worker_running_commands", [_reader(running)], description="Slots in use."
    )
    _meter.create_observable_gauge(
        "noetl_worker_unconfirmed_results",
        [_reader(unconfirmed)],
        description="Results that were sent and are not known to be recorded.",
    )


def _reader(value: Callable[[], float]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def read(_: CallbackOptions) -> Iterable[Observation]:
        yield Observation(value())

    return read
