"""An OTLP collector that keeps what it gets."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Span:
    """A span with the service that told it."""

    def __init__(self, service: str, span: Any) -> None:
        self.service = service
        self.name: str = span.name
        self.trace_id: bytes = span.trace_id
        self.span_id: bytes = span.span_id
        self.parent_id: bytes = span.parent_span_id
        self.start_ns: int = span.start_time_unix_nano
        self.end_ns: int = span.end_time_unix_nano
        self.is_error: bool = span.status.code == span.status.STATUS_CODE_ERROR
        self.links: list[tuple[bytes, bytes]] = [(one.trace_id, one.span_id) for one in span.links]
        self.attributes = {one.key: _value(one.value) for one in span.attributes}


class Collector:
    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Span] = []
        self.metrics: set[str] = set()

    def take(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                named = {one.key: _value(one.value) for one in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self.spans += [Span(named["service.name"], span) for span in scope.spans]
        elif path == "/v1/metrics":
            for measured in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for kind in measured.scope_metrics:
                    self.metrics |= {metric.name for metric in kind.metrics}

    def of(self, execution_id: int) -> list[Span]:
        wanted = str(execution_id)
        return [one for one in self.spans if one.attributes["noetl.execution_id"] == wanted]


def _value(value: Any) -> str:
    return str(getattr(value, value.WhichOneof("value")))


@contextmanager
def running_collector() -> Iterator[Collector]:
    class Door(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.take(self.path, body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Door)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
