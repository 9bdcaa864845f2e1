"""OTLP over HTTP: what is measured and traced, sent to a collector in the background.

A collector that is away costs what was to be sent, never work: queues are bounded, what does not
fit is dropped, and the log says once that nothing arrives.
"""

import threading
from collections.abc import Sequence
from typing import Any
from urllib.request import Request, urlopen

import structlog
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

SEND_SECONDS_MAX = 5.0
METRICS_EVERY_SECONDS = 15.0
SPANS_EVERY_SECONDS = 2.0
SPANS_QUEUED_MAX = 20_000

log = structlog.get_logger()


def metric_reader(endpoint: str) -> PeriodicExportingMetricReader:
    exporter = _Metrics(_Door(f"{endpoint.rstrip('/')}/v1/metrics"))
    return PeriodicExportingMetricReader(
        exporter,
        export_interval_millis=METRICS_EVERY_SECONDS * 1000,
        export_timeout_millis=SEND_SECONDS_MAX * 1000,
    )


def span_processor(endpoint: str) -> BatchSpanProcessor:
    exporter = _Spans(_Door(f"{endpoint.rstrip('/')}/v1/traces"))
    return BatchSpanProcessor(
        exporter,
        max_queue_size=SPANS_QUEUED_MAX,
        schedule_delay_millis=SPANS_EVERY_SECONDS * 1000,
        max_export_batch_size=1000,
        export_timeout_millis=SEND_SECONDS_MAX * 1000,
    )


class _Door:
    """One address of the collector. Used by the one thread that sends to it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_away = False
        self._lock = threading.Lock()

    def send(self, body: bytes) -> bool:
        headers = {"Content-Type": "application/x-protobuf"}
        try:
            request = Request(self._url, body, headers)  # noqa: S310 - the setting allows http only
            with self._lock, urlopen(request, timeout=SEND_SECONDS_MAX) as answer:  # noqa: S310
                answer.read()
        except Exception as error:  # noqa: BLE001 - whatever it answers, or is: we tell, and go on
            if not self._is_away:
                log.warning("telemetry.undelivered", url=self._url, error=repr(error))
            self._is_away = True
            return False
        self._is_away = False
        return True


class _Spans(SpanExporter):
    def __init__(self, door: _Door) -> None:
        self._door = door

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        is_sent = self._door.send(encode_spans(spans).SerializeToString())
        return SpanExportResult.SUCCESS if is_sent else SpanExportResult.FAILURE


class _Metrics(MetricExporter):
    def __init__(self, door: _Door) -> None:
        super().__init__()
        self._door = door

    def export(
        self,
        metrics_data: MetricsData,
        timeout_millis: float = 0,  # noqa: ARG002 - the door has its own
        **_: Any,
    ) -> MetricExportResult:
        is_sent = self._door.send(encode_metrics(metrics_data).SerializeToString())
        return MetricExportResult.SUCCESS if is_sent else MetricExportResult.FAILURE

    def force_flush(self, timeout_millis: float = 0) -> bool:  # noqa: ARG002 - nothing is kept
        return True

    def shutdown(self, timeout_millis: float = 0, **_: Any) -> None:
        pass
