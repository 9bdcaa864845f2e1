"""What a worker tells of a command that it did not end itself."""

import time

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace.status import StatusCode

from noetl_core.process.traces import Spans
from noetl_core.store.postgres import Pool
from services.worker.desk import (
    config,
    eventually,
    issue,
    listening,
    playbook,
    register,
    remove,
    working,
)

SLEEP = playbook(
    """
- step: a
  tool: {kind: python, code: "import time; time.sleep(30)"}
"""
)


class Heard(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


async def test_the_span_of_a_command_that_nobody_wants_any_more_ends_as_stopped(
    database: str, pool: Pool, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    told = Spans(heard, service="worker", instance="w")
    monkeypatch.setattr("noetl_worker.main.spans", lambda _service: told)
    begun_ns = time.time_ns()
    key = await issue(pool, await register(pool, SLEEP), "a")

    async with listening(nats_url, pool) as ear, working(config(database, nats_url)):
        await eventually(lambda: ear.claims)
        await remove(pool, key)
        await eventually(lambda: heard.spans)

    (span,) = heard.spans
    assert span.attributes is not None
    assert span.attributes["noetl.outcome"] == "stopped"
    assert span.attributes["noetl.command_id"] == key[1]
    assert span.status.status_code == StatusCode.UNSET
    assert span.start_time is not None
    assert span.end_time is not None
    assert begun_ns <= span.start_time < span.end_time <= time.time_ns()
