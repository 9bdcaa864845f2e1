"""Metrics: OpenTelemetry instruments, read by Prometheus at /metrics of the health server.

A service declares its instruments once, at the top of its `metrics.py`, on the meter that `meter()`
gives; they count from the moment `set_up_telemetry` ran and cost next to nothing before.
"""

from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import Histogram, MeterProvider
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from prometheus_client import REGISTRY, generate_latest

# From a fast statement to a slow tool; the same steps in either unit.
_BUCKETS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


def meter(service: str) -> metrics.Meter:
    return metrics.get_meter(f"noetl.{service}")


def set_up_telemetry(*, instance: str) -> None:
    """Once per process: from here on instruments count."""
    reader = PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False)
    resource = Resource({"service.name": "noetl", "service.instance.id": instance})
    provider = MeterProvider([reader], resource=resource, views=_views())
    metrics.set_meter_provider(provider)


def exposition() -> bytes:
    """Everything measured so far, in the text format of Prometheus."""
    # The exporter appends the unit in full to a name that ends with its symbol already.
    return generate_latest(REGISTRY).replace(b"_ms_milliseconds", b"_ms")


def _views() -> list[View]:
    return [
        View(
            instrument_type=Histogram,
            instrument_unit=unit,
            aggregation=ExplicitBucketHistogramAggregation([b * scale for b in _BUCKETS_SECONDS]),
        )
        for unit, scale in (("s", 1), ("ms", 1000))
    ]
