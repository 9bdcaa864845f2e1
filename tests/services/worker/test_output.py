"""What is kept of a result and where, what goes to a sink, and what is sent ahead in chunks."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from noetl_core.blob import ReferenceNotAvailableError, ResultStore, document_of
from noetl_core.blob.away import StoreAwayError, StoreRefusedError
from noetl_core.blob.s3 import S3
from noetl_core.blob.s3_tier import S3Tier
from noetl_core.domain.errors import ToolError
from noetl_core.domain.ids import CommandId
from noetl_core.domain.result_view import StepDocument
from noetl_core.process.secrets import generate_key
from noetl_core.store.command import Leased
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Done, Failed, Partial, decode_messages
from noetl_worker import patience
from noetl_worker.names import Names
from noetl_worker.pipeline import Ended
from noetl_worker.plan import StepPlan
from noetl_worker.selection import select
from noetl_worker.tools.tool import ToolCall, ToolResult
from services.worker.bench import Bench, ScriptedTool
from services.worker.desk import (
    EXECUTION,
    Ear,
    config,
    issue,
    listening,
    playbook,
    register,
    working,
)
from support.s3 import BUCKET, Gate, settings

BUSY = ToolError(kind="rate_limit", message="slow down", retryable=True)


@pytest.fixture
def bench(pool: Pool) -> Bench:
    return Bench(pool, generate_key())


PAGE = {"paging": {"total": 9, "page": 1}, "rows": [{"id": 1, "n": "a"}, {"id": 2}], "n": None}


@pytest.mark.parametrize(
    ("value", "paths", "kept"),
    [
        (PAGE, ["paging.total"], {"paging": {"total": 9}}),
        (PAGE, ["rows.id", "n"], {"rows": [{"id": 1}, {"id": 2}], "n": None}),
        (PAGE, ["paging", "paging.total"], {"paging": {"total": 9, "page": 1}}),
        (PAGE, ["data.paging.page"], {"paging": {"page": 1}}),
        (PAGE, ["data"], PAGE),
        ({"data": {"a": 1, "b": 2}, "c": 3}, ["data.a"], {"data": {"a": 1}}),
        (PAGE["rows"], ["id"], [{"id": 1}, {"id": 2}]),
        (PAGE, ["nothing", "n.below", "paging.no"], {"paging": {}}),
        (5, ["id"], {}),
    ],
    ids=str,
)
def test_select_keeps_the_paths_and_their_shape(value: Any, paths: list[str], kept: Any) -> None:
    assert select(value, paths) == kept


async def test_what_is_not_selected_is_neither_stored_nor_routed_on(bench: Bench) -> None:
    bench.answers({"total": 3, "rows": [1, 2], "rest": "x" * 1000})

    end = await bench.run(
        """
- step: a
  tool: {kind: noop}
  output: {select: [total]}
  next: {arcs: [{step: b, when: "{{ output.data.total and output.rows | default([]) }}"}]}
- step: b
  tool: {kind: noop}
"""
    )

    assert isinstance(end, Done)
    assert end.stored is not None
    assert document_of(end.stored) == {"total": 3}
    assert end.context == {"data.total": 3}


async def test_of_a_pipeline_select_keeps_the_last_result_and_the_tasks_it_names(
    bench: Bench,
) -> None:
    bench.answers({"a": 1, "b": 2}, {"c": 3, "d": 4}, {"e": 5, "f": 6})

    document = await bench.value(
        """
- step: a
  tool:
    - {name: one, kind: noop}
    - {name: two, kind: noop}
    - {name: three, kind: noop}
  output: {select: [e, results.one.a]}
"""
    )

    assert document == StepDocument(data={"e": 5}, task="three", earlier={"one": {"a": 1}})


async def test_a_result_goes_where_the_step_says(bench: Bench, tmp_path: Path) -> None:
    bench.results = ResultStore(store_dir=str(tmp_path))

    async def stored(kind: str, value: Any) -> Any:
        bench.answers(value)
        end = await bench.run(
            f"- step: a\n  tool: {{kind: noop}}\n  output: {{store: {{kind: {kind}}}}}"
        )
        assert isinstance(end, Done)
        assert end.stored is not None
        return end.stored.tier

    large = "x" * 100_000
    assert [await stored(kind, 1) for kind in ("auto", "db", "pvc")] == ["db", "db", "pvc"]
    assert [await stored(kind, large) for kind in ("auto", "db", "pvc")] == ["pvc", "db", "pvc"]


async def test_a_result_says_how_long_it_is_kept(bench: Bench) -> None:
    bench.answers(1, 2)

    kept = await bench.run("- step: a\n  tool: {kind: noop}\n  output: {store: {ttl: 7d}}")
    other = await bench.run("- step: a\n  tool: {kind: noop}")

    assert isinstance(kept, Done)
    assert isinstance(other, Done)
    assert kept.stored is not None
    assert other.stored is not None
    assert (kept.stored.ttl_s, other.stored.ttl_s) == (7 * 86400, None)


@pytest.mark.parametrize(("kind", "named"), [("pvc", "NOETL_STORE_DIR"), ("s3", "output.store")])
async def test_a_place_that_is_not_there_is_said_before_the_tool_runs(
    bench: Bench, kind: str, named: str
) -> None:
    tool = bench.answers(1)

    error = await bench.error(
        f"- step: a\n  tool: {{kind: noop}}\n  output: {{store: {{kind: {kind}}}}}"
    )

    assert (error.kind, error.code) == ("not_supported", "NO_STORE")
    assert named in error.message
    assert tool.calls == []


async def test_what_must_go_into_the_database_and_does_not_fit_is_said(
    bench: Bench, tmp_path: Path
) -> None:
    bench.results = ResultStore(store_dir=str(tmp_path))
    bench.answers("x" * (17 * 1024 * 1024))

    error = await bench.error("- step: a\n  tool: {kind: noop}\n  output: {store: {kind: db}}")

    assert error.kind == "result_too_large"
    assert "output.store.kind: db" in error.message


SINK = "- step: a\n  tool: {kind: noop}\n  sink: {tool: postgres, table: t, args: '{{ output.n }}'}"


async def test_a_sink_gets_the_whole_result_before_it_is_cut(bench: Bench) -> None:
    seen: list[Any] = []

    async def sink(plan: StepPlan, names: Names, ended: Ended, leased: Leased) -> ToolError | None:
        assert plan.sink is not None
        seen.append((ended.data, (await names.rendered(plan.sink))["args"], leased.command_id))
        return None

    bench.answers({"n": 1, "m": 2})
    bench.sink = sink

    assert await bench.value(f"{SINK}\n  output: {{select: [m]}}") == {"m": 2}
    assert seen == [({"n": 1, "m": 2}, 1, "a.1#1")]


async def test_a_sink_that_fails_fails_the_command_with_its_error(bench: Bench) -> None:
    async def sink(plan: StepPlan, names: Names, ended: Ended, leased: Leased) -> ToolError | None:
        return ToolError(kind="db_constraint", message="twice", details={"pg": {"x": 1}})

    bench.answers({"n": 1})
    bench.sink = sink

    end = await bench.run(SINK)

    assert isinstance(end, Failed)
    assert end.error.kind == "db_constraint"
    assert end.error.details == {"pg": {"x": 1}, "sink": True}


async def test_nothing_is_written_of_a_call_that_failed(bench: Bench) -> None:
    async def sink(plan: StepPlan, names: Names, ended: Ended, leased: Leased) -> ToolError | None:
        raise AssertionError(ended)

    bench.answers(ToolResult(error=BUSY))
    bench.sink = sink

    assert (await bench.error(SINK)).kind == "rate_limit"


class Streaming(ScriptedTool):
    """Emits as many chunks as it is told for each call, then answers what is scripted."""

    def __init__(self, *chunks: int, results: tuple[Any, ...] = ()) -> None:
        super().__init__("noop", *results)
        self._chunks = list(chunks)

    async def run(self, call: ToolCall) -> Any:
        assert call.emit is not None
        for n in range(self._chunks.pop(0)):
            await call.emit({"rows": [n], "of": call.label})
        return await super().run(call)


STREAM = """
- step: a
  tool: {kind: noop}
  next: {arcs: [{step: b, on: call.partial, when: "{{ output.rows }}"}]}
- step: b
  tool: {kind: noop}
"""


async def partials(pool: Pool) -> list[Partial]:
    bodies = await pool.fetch("SELECT body FROM noetl.inbox ORDER BY inbox_id")
    return [m for row in bodies for m in decode_messages(row["body"]) if isinstance(m, Partial)]


async def test_chunks_are_in_the_inbox_in_order_before_the_end(bench: Bench, pool: Pool) -> None:
    bench.tools["noop"] = Streaming(3)

    end = await bench.run(STREAM)

    sent = await partials(pool)
    assert isinstance(end, Done)
    assert end.chunks == 3
    assert [m.chunk_index for m in sent] == [0, 1, 2]
    assert [document_of(m.stored)["rows"] for m in sent] == [[0], [1], [2]]
    assert sent[1].context == {"rows": [1]}


async def test_chunks_that_are_recorded_are_not_sent_again(bench: Bench, pool: Pool) -> None:
    tool = bench.tools["noop"] = Streaming(4)

    end = await bench.run(STREAM, chunks=3)

    assert isinstance(end, Done)
    assert end.chunks == 4
    assert [m.chunk_index for m in await partials(pool)] == [3]
    assert isinstance(tool, Streaming)
    assert tool.calls[0].chunks_done == 3


async def test_a_task_that_is_tried_again_repeats_no_chunk(bench: Bench, pool: Pool) -> None:
    bench.tools["noop"] = Streaming(2, 3, results=(ToolResult(error=BUSY), 1))
    retry = (
        "spec: {policy: {rules: [{when: \"{{ error.kind == 'rate_limit' }}\", then: {do: retry}}]}}"
    )

    end = await bench.run(
        STREAM.replace("{kind: noop}\n  next", f"{{kind: noop, {retry}}}\n  next")
    )

    assert isinstance(end, Done)
    assert end.chunks == 3
    assert [document_of(m.stored)["rows"] for m in await partials(pool)] == [[0], [1], [2]]


async def test_two_tasks_of_a_pipeline_stream_one_after_the_other(bench: Bench, pool: Pool) -> None:
    bench.tools["noop"] = Streaming(2, 1)
    two = "[{name: x, kind: noop}, {name: y, kind: noop}]"

    end = await bench.run(STREAM.replace("{kind: noop}\n  next", f"{two}\n  next"))

    assert isinstance(end, Done)
    assert end.chunks == 3
    assert [document_of(m.stored)["of"] for m in await partials(pool)] == ["x", "x", "y"]


async def test_a_chunk_is_stored_as_the_step_says(bench: Bench, pool: Pool, tmp_path: Path) -> None:
    bench.results = ResultStore(store_dir=str(tmp_path))
    bench.tools["noop"] = Streaming(1)
    where = "output: {select: [rows], store: {kind: pvc, ttl: 1h}}"

    await bench.run(STREAM.replace("  next", f"  {where}\n  next", 1))

    (sent,) = await partials(pool)
    assert (sent.stored.tier, sent.stored.ttl_s) == ("pvc", 3600)
    assert await bench.results.read_stored(sent.execution_id, sent.stored) == {"rows": [0]}


async def test_a_chunk_that_is_no_data_fails_the_command(bench: Bench, pool: Pool) -> None:
    class Broken(ScriptedTool):
        async def run(self, call: ToolCall) -> ToolResult:
            assert call.emit is not None
            await call.emit({"x": object()})
            return ToolResult()

    bench.tools["noop"] = Broken("noop")

    assert (await bench.error(STREAM)).code == "NOT_JSON"
    assert await partials(pool) == []


async def test_where_nobody_listens_there_is_nothing_to_emit_to(bench: Bench) -> None:
    tool = bench.answers(1)

    await bench.run("- step: a\n  tool: {kind: noop}")

    assert tool.calls[0].emit is None


async def test_the_end_of_a_streamed_command_comes_after_its_chunks(
    database: str, pool: Pool, nats_url: str
) -> None:
    """By NATS it would overtake them."""
    catalog_id = await register(pool, playbook(STREAM_ROWS.format(dsn=database)))

    async with listening(nats_url, pool) as ear, working(config(database, nats_url)):
        key = await issue(pool, catalog_id, "a")
        ends = await _drained(ear, key[1])

    indexes = [m.chunk_index for m in ear.messages if isinstance(m, Partial)]
    assert indexes == list(range(ends.chunks))
    assert ends.chunks >= 1
    assert isinstance(ear.messages[-1], Done)
    assert all(not isinstance(m, Done) for batch in ear.batches[:-1] for m in batch)


STREAM_ROWS = """
- step: a
  tool:
    kind: postgres
    auth: "{dsn}"
    chunk_size: 2
    command: SELECT n FROM generate_series(1, 5) n ORDER BY n
  next: {{arcs: [{{step: b, on: call.partial}}]}}
- step: b
  tool: {{kind: noop}}
"""


async def _drained(ear: Ear, command_id: CommandId) -> Done:
    async with asyncio.timeout(60):
        while True:
            await ear.drain_inbox()
            for end in ear.ends:
                if end.command_id == command_id:
                    assert isinstance(end, Done), end
                    return end
            await asyncio.sleep(0.01)


TO_S3 = "- step: a\n  tool: {kind: noop}\n  output: {store: {kind: s3}}"


async def test_a_result_can_go_to_s3(bench: Bench, s3: S3) -> None:
    bench.results = ResultStore(objects=S3Tier(s3, BUCKET))
    bench.answers({"a": 1})

    end = await bench.run(TO_S3)

    assert isinstance(end, Done)
    assert end.stored is not None
    assert (end.stored.tier, end.stored.inline) == ("s3", None)
    assert await bench.results.read_stored(EXECUTION, end.stored) == {"a": 1}


async def test_a_result_that_must_go_to_an_s3_that_is_away_may_be_tried_again(
    bench: Bench, gate: Gate
) -> None:
    gate.spoil("shut")
    async with S3(settings(gate.url, timeout_seconds=1.0)) as s3:
        bench.results = ResultStore(objects=S3Tier(s3, BUCKET))
        bench.answers({"a": 1})

        error = await bench.error(TO_S3)

    assert (error.code, error.retryable) == ("REFERENCE_NOT_AVAILABLE", True)
    assert "could not put" in error.message


async def test_a_store_that_is_away_is_asked_again_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patience, "backoff_seconds", lambda _failures: 0.0)
    asked = 0

    async def ask() -> str:
        nonlocal asked
        asked += 1
        if asked < answers_at:
            raise StoreAwayError("away")
        return "found"

    answers_at = patience.STORE_TRIES_MAX
    assert await patience.read_patiently(EXECUTION, ask) == "found"
    asked, answers_at = 0, patience.STORE_TRIES_MAX + 1
    with pytest.raises(ReferenceNotAvailableError, match="away"):
        await patience.read_patiently(EXECUTION, ask)


async def test_a_store_that_refuses_us_is_not_asked_again() -> None:
    asked = 0

    async def ask() -> None:
        nonlocal asked
        asked += 1
        raise StoreRefusedError("no")

    with pytest.raises(ReferenceNotAvailableError, match="no"):
        await patience.read_patiently(EXECUTION, ask)
    assert asked == 1
