"""Metrics: OpenTelemetry instruments, read by Prometheus at /metrics of the health server.

A service declares its instruments once, at the top of its `metrics.py`, on the meter that `meter()`
gives; they count from the moment `set_up_telemetry` ran and cost next to nothing before.
"""

from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from prometheus_client import REGISTRY, generate_latest


def meter(service: str) -> metrics.Meter:
    return metrics.get_meter(f"noetl.{service}")


def set_up_telemetry(*, instance: str) -> None:
    """Once per process: from here on instruments count."""
    reader = PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False)
    resource = Resource({"service.name": "noetl", "service.instance.id": instance})
    metrics.set_meter_provider(MeterProvider([reader], resource=resource))


def exposition() -> bytes:
    """Everything measured so far, in the text format of Prometheus."""
    return generate_latest(REGISTRY)
