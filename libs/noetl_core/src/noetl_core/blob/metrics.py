"""What reading results and archives costs, in whichever process reads them."""

from opentelemetry import metrics

_meter = metrics.get_meter("noetl.blob")

RESOLVE_MS = _meter.create_histogram(
    "noetl_reference_resolve_ms",
    unit="ms",
    description="From a reference to its document, by tier (db, pvc, ...; cache: it was at hand; "
    "eventlog, pages: of what a loop or pages returned together; many: of several at once).",
)
S3_REQUESTS = _meter.create_counter(
    "noetl_s3_requests",
    description="Requests to S3, by operation (put, read, list, ...) and outcome (ok, missing: "
    "there is no such object, away: no usable answer).",
)
S3_MS = _meter.create_histogram(
    "noetl_s3_ms", unit="ms", description="Time of a request to S3, by operation, with its body."
)
ARCHIVE_COPIES_BYTES = _meter.create_gauge(
    "noetl_archive_copies_bytes",
    unit="By",
    description="Files of archives that a reader has copied from S3 and keeps on its disk.",
)
FALLBACKS = _meter.create_counter(
    "noetl_store_fallbacks",
    description="Times that a tier was found away and the next one took over, by tier.",
)
