"""What a broker measures."""

from opentelemetry import metrics

from noetl_core.store.batch import Batch

_meter = metrics.get_meter("noetl.broker")

EVENTS = _meter.create_counter(
    "noetl_broker_events_total", unit="1", description="Events appended to the log."
)
COMMIT_MS = _meter.create_histogram(
    "noetl_broker_commit_ms", unit="ms", description="Time of one group commit."
)
BATCH_EVENTS = _meter.create_histogram(
    "noetl_broker_batch_events", unit="1", description="Events in one group commit."
)
RELOADS = _meter.create_counter(
    "noetl_broker_reloads_total",
    unit="1",
    description="Batches redone because the database held more than we knew.",
)
REPLAYED = _meter.create_counter(
    "noetl_broker_replayed_events",
    unit="1",
    description="Events past a snapshot that were folded because a state was not in memory.",
)
PARKED = _meter.create_counter(
    "noetl_broker_parked_total", unit="1", description="Bodies moved to the dead letters."
)
RESULT_BYTES = _meter.create_histogram(
    "noetl_event_result_bytes",
    unit="By",
    description="Size of event.result, of every 16th event that has one.",
    explicit_bucket_boundaries_advisory=[0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 65_536],
)

RESULTS_PER_RECORD = 16
"""A record for each row would cost more than the row; every so many give the same picture."""

_results_passed = 0


def measure(batch: Batch) -> None:
    """What a committed batch held."""
    global _results_passed  # noqa: PLW0603 - the sample goes on from batch to batch
    EVENTS.add(len(batch.events))
    BATCH_EVENTS.record(len(batch.events))
    if batch.dead_letters:
        PARKED.add(len(batch.dead_letters))
    sizes = [len(row.result) for row in batch.events if row.result]
    for size in sizes[-_results_passed % RESULTS_PER_RECORD :: RESULTS_PER_RECORD]:
        RESULT_BYTES.record(size)
    _results_passed += len(sizes)
