"""The metrics of the gateway."""

from noetl_core.process.telemetry import meter

_meter = meter("api-gateway")

REQUESTS = _meter.create_counter(
    "noetl_gateway_requests", description="Requests answered, by method, route and status."
)
REQUEST_MS = _meter.create_histogram(
    "noetl_gateway_request_ms",
    unit="ms",
    description="From the first byte of a request to the start of its answer, by method and route.",
    explicit_bucket_boundaries_advisory=[1, 2, 5, 10, 25, 50, 100, 250, 1000, 5000, 60_000],
)
EXECUTIONS_ACCEPTED = _meter.create_counter(
    "noetl_gateway_executions_accepted", description="Executions promised to clients."
)
