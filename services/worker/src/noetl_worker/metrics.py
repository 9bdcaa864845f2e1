"""What the worker measures. Counted per batch, not per command: a command costs microseconds."""

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Observation

from noetl_core.process.telemetry import meter

_meter = meter("worker")

LEASED = _meter.create_counter("noetl_worker_leased_commands", description="Commands leased.")
COMMANDS = _meter.create_counter(
    "noetl_worker_commands", description="Commands that ended here, by outcome."
)
BUSY_SECONDS = _meter.create_counter(
    "noetl_worker_busy_seconds", unit="s", description="Time spent in commands, summed over slots."
)
BATCHES = _meter.create_counter(
    "noetl_worker_batches", description="Messages sent to brokers, by the road they took."
)
REPUBLISHED = _meter.create_counter(
    "noetl_worker_republished_results", description="Results sent again for want of confirmation."
)
STOPPED = _meter.create_counter(
    "noetl_worker_stopped_commands", description="Commands stopped because their row was gone."
)


def watch(running: Callable[[], int], unconfirmed: Callable[[], int]) -> None:
    """Gauges that are read when somebody asks for the metrics."""
    _meter.create_observable_gauge(
        "noetl_worker_running_commands", [_reader(running)], description="Slots in use."
    )
    _meter.create_observable_gauge(
        "noetl_worker_unconfirmed_results",
        [_reader(unconfirmed)],
        description="Results that were sent and are not known to be recorded.",
    )


def _reader(value: Callable[[], int]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def read(_: CallbackOptions) -> Iterable[Observation]:
        yield Observation(value())

    return read
