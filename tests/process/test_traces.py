"""Spans without a context to carry: ids are names, so every service tells its own part."""

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace.status import StatusCode
from structlog.testing import CapturingLogger

from noetl_broker.tracing import StepSpans
from noetl_core.domain import trace_ids
from noetl_core.domain.envelope import Envelope
from noetl_core.domain.errors import ToolError
from noetl_core.domain.events import (
    AnyFact,
    CommandClaimed,
    CommandExpired,
    Event,
    ExecutionCancelled,
    StepEntered,
    StepExited,
)
from noetl_core.domain.ids import (
    CatalogId,
    CommandId,
    EventId,
    ExecutionId,
    ShardId,
    StepName,
    VisitId,
    WorkerId,
)
from noetl_core.domain.snowflake import first_id_at
from noetl_core.domain.state import ExecutionState, ExecutionStatus
from noetl_core.process import otlp
from noetl_core.process.telemetry import LAST_WORDS_SECONDS_MAX, spans
from noetl_core.process.traces import Spans
from noetl_core.store.event import EventRow, event_row
from noetl_core.store.execution_projection import Projected
from noetl_core.store.postgres import Pool
from noetl_projection.tracing import tell_ended
from services.projection.logs import Logged, append, shard
from support.collector import Collector, running_collector

NOW_MS = int(time.time() * 1000)
EXECUTION = ExecutionId(first_id_at(NOW_MS - 2000))
LOAD = StepName("load")


class Heard(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with running_collector() as running:
        yield running


def at(ms: int, fact: AnyFact) -> Event:
    return Event(execution_id=EXECUTION, event_id=EventId(first_id_at(NOW_MS + ms)), fact=fact)


def row(event: Event) -> EventRow:
    return event_row(event, shard_id=ShardId(0), epoch_id=None)


ENTERED = StepEntered(step=LOAD, visit=1)
EXITED = StepExited(step=LOAD, visit=1, result=Envelope(status="ok"))


def context_of(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def test_names_make_ids_and_different_names_make_different_ones() -> None:
    ids = {
        trace_ids.execution_span(EXECUTION),
        trace_ids.visit_span(EXECUTION, VisitId("load.1")),
        trace_ids.visit_span(EXECUTION, VisitId("load.2")),
        trace_ids.command_span(EXECUTION, CommandId("load.1#1")),
        trace_ids.command_span(EXECUTION, CommandId("load.1#2")),
        trace_ids.command_span(ExecutionId(EXECUTION + 1), CommandId("load.1#1")),
    }

    assert len(ids) == 6
    assert all(0 < one < 1 << 64 for one in ids)
    assert trace_ids.trace_id(EXECUTION) != trace_ids.trace_id(ExecutionId(EXECUTION + 1))


def test_another_process_makes_the_same_ids_of_the_same_names() -> None:
    code = (
        "from noetl_core.domain import trace_ids as t;"
        f"print(t.trace_id({EXECUTION}), t.command_span({EXECUTION}, 'load.1#1'))"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert said.stdout.split() == [
        str(trace_ids.trace_id(EXECUTION)),
        str(trace_ids.command_span(EXECUTION, CommandId("load.1#1"))),
    ]


SILENT = """
import socket, time
from noetl_core.process.telemetry import set_up_telemetry, spans

listening = socket.socket()
listening.bind(("127.0.0.1", 0))
listening.listen(100)
url = f"http://127.0.0.1:{listening.getsockname()[1]}"
shut_down = set_up_telemetry(instance="i", otlp_endpoint=url)
told = spans("broker")
for n in range(8000):
    told.visit(n, f"a.{n}", "step a", (time.time_ns(), time.time_ns()), {})
begun = time.perf_counter()
shut_down()
print(time.perf_counter() - begun)
"""


def test_a_collector_that_listens_and_says_nothing_delays_the_end_by_two_seconds_at_most() -> None:
    said = subprocess.run(
        [sys.executable, "-c", SILENT], check=True, capture_output=True, text=True, timeout=60
    )

    assert float(said.stdout) < LAST_WORDS_SECONDS_MAX + 1


def test_nobody_wants_spans_unless_an_endpoint_is_set() -> None:
    assert spans("broker") is None


async def test_a_visit_lasts_from_its_entry_to_its_exit(pool: Pool, heard: Heard) -> None:
    steps = StepSpans(pool, Spans(heard, service="broker", instance="b"))

    steps.note([row(at(0, ENTERED))])
    await steps.tell()
    assert heard.spans == []
    steps.note([row(at(250, EXITED))])
    await steps.tell()

    (span,) = heard.spans
    assert span.name == "step load"
    assert context_of(span) == (
        trace_ids.trace_id(EXECUTION),
        trace_ids.visit_span(EXECUTION, VisitId("load.1")),
    )
    assert span.parent is not None
    assert span.parent.span_id == trace_ids.execution_span(EXECUTION)
    assert span.start_time == NOW_MS * 1_000_000
    assert span.end_time == (NOW_MS + 250) * 1_000_000


async def test_a_broker_that_took_over_finds_in_the_log_when_a_visit_began(
    pool: Pool, heard: Heard
) -> None:
    entered = at(0, ENTERED)
    await append(pool, [Logged(entered, shard(EXECUTION), datetime.now(UTC))])
    steps = StepSpans(pool, Spans(heard, service="broker", instance="b"))

    steps.note([row(at(80, EXITED))])
    await steps.tell()

    (span,) = heard.spans
    assert span.start_time == NOW_MS * 1_000_000


async def test_visits_that_are_cut_short_end_with_their_execution(pool: Pool, heard: Heard) -> None:
    steps = StepSpans(pool, Spans(heard, service="broker", instance="b"))

    steps.note([row(at(0, ENTERED)), row(at(40, ExecutionCancelled()))])
    await steps.tell()

    (span,) = heard.spans
    assert span.status.status_code == StatusCode.ERROR
    assert span.end_time == (NOW_MS + 40) * 1_000_000


async def test_a_visit_that_another_broker_began_is_cut_short_with_its_execution(
    pool: Pool, heard: Heard
) -> None:
    done_before = [
        at(0, StepEntered(step=StepName("first"), visit=1)),
        at(5, StepExited(step=StepName("first"), visit=1, result=Envelope(status="ok"))),
    ]
    log = [*done_before, at(10, ENTERED)]
    await append(pool, [Logged(one, shard(EXECUTION), datetime.now(UTC)) for one in log])
    steps = StepSpans(pool, Spans(heard, service="broker", instance="b"))

    steps.note([row(at(40, ExecutionCancelled()))])
    await steps.tell()
    await steps.tell()

    (span,) = heard.spans
    assert span.name == "step load"
    assert span.start_time == (NOW_MS + 10) * 1_000_000
    assert span.end_time == (NOW_MS + 40) * 1_000_000


async def test_an_attempt_whose_worker_died_has_a_span(pool: Pool, heard: Heard) -> None:
    command = CommandId("load.1#1")
    claimed = CommandClaimed(step=LOAD, visit=1, command_id=command, worker_id=WorkerId("w"))
    lost = ToolError(kind="lease_expired", message="the lease ran out")
    expired = CommandExpired(step=LOAD, visit=1, command_id=command, error=lost)
    await append(pool, [Logged(at(0, claimed), shard(EXECUTION), datetime.now(UTC))])
    steps = StepSpans(pool, Spans(heard, service="broker", instance="b"))

    steps.note([row(at(30_000, expired))])
    await steps.tell()

    (span,) = heard.spans
    assert context_of(span)[1] == trace_ids.command_span(EXECUTION, command)
    assert span.parent is not None
    assert span.parent.span_id == trace_ids.visit_span(EXECUTION, VisitId("load.1"))
    assert (span.start_time, span.end_time) == (NOW_MS * 10**6, (NOW_MS + 30_000) * 10**6)
    assert span.status.status_code == StatusCode.ERROR


def ended(status: ExecutionStatus, at_seconds: float, **fields: object) -> Projected:
    state = ExecutionState(execution_id=EXECUTION, catalog_id=CatalogId(1), status=status)
    if status == "FAILED":
        state.error = ToolError(kind="http", message="a secret")
    moment = datetime.fromtimestamp(at_seconds, UTC)
    return Projected(
        state=state,
        shard_id=ShardId(0),
        started_at=datetime.fromtimestamp(at_seconds - 1.5, UTC),  # its first event was committed
        updated_at=moment,
        ended_at=moment,
        last_event_type=f"execution.{status.lower()}",
        last_event_id=EventId(9),
        path="demo/flow",
    )


def test_an_execution_is_the_root_of_its_trace(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("noetl_projection.tracing.AGE_SECONDS_MAX", math.inf)  # it ended at import
    child = ended("FAILED", NOW_MS / 1000)
    child.state.parent_execution_id = ExecutionId(5)
    child.state.parent_command_id = CommandId("call.1#1")

    tell_ended(Spans(heard, service="projection", instance="p"), [child])

    (span,) = heard.spans
    assert span.parent is None
    assert span.name == "execution demo/flow"
    assert context_of(span)[1] == trace_ids.execution_span(EXECUTION)
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time == pytest.approx(2e9, abs=2000)
    assert span.status.description == "http"  # its kind: a message may hold anything
    (link,) = span.links
    assert link.context.trace_id == trace_ids.trace_id(ExecutionId(5))
    assert link.context.span_id == trace_ids.command_span(ExecutionId(5), CommandId("call.1#1"))


def test_a_replay_of_long_ago_tells_no_traces(heard: Heard) -> None:
    tell_ended(
        Spans(heard, service="projection", instance="p"), [ended("COMPLETED", time.time() - 3600)]
    )

    assert heard.spans == []


def test_spans_reach_a_collector(collector: Collector) -> None:
    processor = otlp.span_processor(collector.url)

    tell_ended(
        Spans(processor, service="projection", instance="p"), [ended("COMPLETED", time.time())]
    )
    processor.force_flush(5000)

    (span,) = collector.of(EXECUTION)
    assert span.service == "noetl-projection"
    assert span.trace_id == trace_ids.trace_id(EXECUTION).to_bytes(16, "big")
    processor.shutdown()  # type: ignore[no-untyped-call]


def test_a_collector_that_is_away_costs_nothing_but_the_spans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = CapturingLogger()
    monkeypatch.setattr(otlp, "log", said)
    processor = otlp.span_processor("http://127.0.0.1:9")
    told = Spans(processor, service="projection", instance="p")

    for _ in range(3):
        tell_ended(told, [ended("COMPLETED", time.time())])
        processor.force_flush(5000)

    assert [call.args for call in said.calls] == [("telemetry.undelivered",)]
    processor.shutdown()  # type: ignore[no-untyped-call]
