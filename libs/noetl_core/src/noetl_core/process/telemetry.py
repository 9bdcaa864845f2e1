"""Metrics: OpenTelemetry instruments, read by Prometheus at /metrics of the health server.

A service declares its instruments once, at the top of its `metrics.py`, on the meter that `meter()`
gives; they count from the moment `set_up_telemetry` ran and cost next to nothing before. With an
OTLP endpoint they are sent there, too, and so are traces: `spans()` gives where to tell them.
"""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

    from noetl_core.process.traces import Spans

LAST_WORDS_SECONDS_MAX = 2.0

# From a fast statement to a slow tool; the same steps in either unit.
_BUCKETS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


def meter(service: str) -> metrics.Meter:
    return metrics.get_meter(f"noetl.{service}")


def set_up_telemetry(*, instance: str, otlp_endpoint: str = "") -> Callable[[], None]:
    """Once per process: from here on instruments count. What it returns sends the last of it."""
    global _make_spans  # noqa: PLW0603 - a process has one
    readers: list[MetricReader] = [
        PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False)
    ]
    processor = None
    if otlp_endpoint:
        # Only who wants it pays for the import.
        from noetl_core.process import otlp  # noqa: PLC0415

        readers.append(otlp.metric_reader(otlp_endpoint))
        processor = otlp.span_processor(otlp_endpoint)
        _make_spans = _spans_through(processor, instance)
    resource = Resource({"service.name": "noetl", "service.instance.id": instance})
    provider = MeterProvider(readers, resource=resource, views=_views(), shutdown_on_exit=False)
    metrics.set_meter_provider(provider)

    def shut_down() -> None:
        if processor is not None:
            _in_time(processor.shutdown, provider.shutdown)

    return shut_down


def _in_time(*last_words: Callable[[], None]) -> None:
    """Say them at the same time. A collector that listens and says nothing keeps nobody alive: the
    libraries wait for half a minute, and these threads end with the process."""
    threads = [threading.Thread(target=say, daemon=True) for say in last_words]
    for thread in threads:
        thread.start()
    until = time.monotonic() + LAST_WORDS_SECONDS_MAX
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


_make_spans: "Callable[[str], Spans] | None" = None


def spans(service: str) -> "Spans | None":
    """Where a service tells its spans; None when nobody wants them. Ask once, at the start."""
    return None if _make_spans is None else _make_spans(service)


def _spans_through(processor: "SpanProcessor", instance: str) -> "Callable[[str], Spans]":
    from noetl_core.process.traces import Spans  # noqa: PLC0415 - the same

    return lambda service: Spans(processor, service=service, instance=instance)


def exposition(registry: CollectorRegistry = REGISTRY) -> bytes:
    """Everything measured so far, in the text format of Prometheus."""
    # The exporter appends the unit in full to a name that ends with its symbol already.
    return generate_latest(registry).replace(b"_ms_milliseconds", b"_ms")


def _views() -> list[View]:
    return [
        View(
            instrument_type=Histogram,
            instrument_unit=unit,
            aggregation=ExplicitBucketHistogramAggregation([b * scale for b in _BUCKETS_SECONDS]),
        )
        for unit, scale in (("s", 1), ("ms", 1000))
    ]
