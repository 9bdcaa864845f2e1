"""Spans that services tell when something is over, with the times at which it really happened.

There is no context to carry: ids are made from names (domain/trace_ids.py). A service asks once,
at its start, whether anybody wants spans; if not, it has nothing to tell them to.
"""

from collections.abc import Mapping

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from noetl_core.domain import trace_ids
from noetl_core.domain.ids import CommandId, ExecutionId, VisitId

NANOSECONDS_PER_MS = 1_000_000

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class Spans:
    """Where one service tells its spans."""

    def __init__(self, processor: SpanProcessor, *, service: str, instance: str) -> None:
        self._processor = processor
        self._scope = InstrumentationScope(f"noetl.{service}")
        self._resource = Resource(
            {"service.name": f"noetl-{service}", "service.instance.id": instance}
        )

    def execution(
        self,
        execution_id: ExecutionId,
        name: str,
        times_ns: tuple[int, int],
        attributes: Mapping[str, str | int],
        *,
        error: str | None = None,
        caller: tuple[ExecutionId, CommandId] | None = None,
    ) -> None:
        """The whole of it. `caller`: the command of another execution that waits for it."""
        span_id = trace_ids.execution_span(execution_id)
        links = [] if caller is None else [_link(*caller)]
        self._tell(execution_id, span_id, None, name, times_ns, attributes, error, links)

    def visit(
        self,
        execution_id: ExecutionId,
        visit: VisitId,
        name: str,
        times_ns: tuple[int, int],
        attributes: Mapping[str, str | int],
        *,
        error: str | None = None,
    ) -> None:
        span_id = trace_ids.visit_span(execution_id, visit)
        parent_id = trace_ids.execution_span(execution_id)
        self._tell(execution_id, span_id, parent_id, name, times_ns, attributes, error)

    def command(
        self,
        execution_id: ExecutionId,
        visit: VisitId,
        command_id: CommandId,
        name: str,
        times_ns: tuple[int, int],
        attributes: Mapping[str, str | int],
        *,
        error: str | None = None,
    ) -> None:
        span_id = trace_ids.command_span(execution_id, command_id)
        parent_id = trace_ids.visit_span(execution_id, visit)
        self._tell(execution_id, span_id, parent_id, name, times_ns, attributes, error)

    def _tell(
        self,
        execution_id: ExecutionId,
        span_id: int,
        parent_id: int | None,
        name: str,
        times_ns: tuple[int, int],
        attributes: Mapping[str, str | int],
        error: str | None,
        links: list[Link] | None = None,
    ) -> None:
        start, end = times_ns
        self._processor.on_end(
            ReadableSpan(
                name,
                context=_context(execution_id, span_id),
                parent=None if parent_id is None else _context(execution_id, parent_id),
                resource=self._resource,
                attributes={"noetl.execution_id": str(execution_id), **attributes},
                links=links or (),
                status=Status(StatusCode.UNSET) if error is None else _failed(error),
                start_time=start,
                end_time=max(start, end),
                instrumentation_scope=self._scope,
            )
        )


def _context(execution_id: ExecutionId, span_id: int) -> SpanContext:
    trace_id = trace_ids.trace_id(execution_id)
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=_SAMPLED)


def _link(execution_id: ExecutionId, command_id: CommandId) -> Link:
    return Link(_context(execution_id, trace_ids.command_span(execution_id, command_id)))


def _failed(error: str) -> Status:
    return Status(StatusCode.ERROR, error)
