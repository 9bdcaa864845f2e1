"""What reading results costs, in whichever process reads them."""

from opentelemetry import metrics

_meter = metrics.get_meter("noetl.blob")

RESOLVE_MS = _meter.create_histogram(
    "noetl_reference_resolve_ms",
    unit="ms",
    description="From a reference to its document, by tier (db, pvc, ...; cache: it was at hand).",
)
