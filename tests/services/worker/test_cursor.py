"""Cursor loops: a frame is claimed from a real table, and its rows go through the pipeline."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from noetl_core.blob import document_of
from noetl_core.domain.brief import Element
from noetl_core.domain.errors import ToolError
from noetl_core.domain.ids import LoopId
from noetl_core.domain.result_view import StepDocument
from noetl_core.process.secrets import generate_key
from noetl_core.store import credential
from noetl_core.store.command import Leased
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Done, Failed
from noetl_worker.names import Names
from noetl_worker.pipeline import Ended
from noetl_worker.plan import StepPlan
from noetl_worker.tools.postgres import PostgresTool
from noetl_worker.tools.tool import ToolCall, ToolResult
from services.worker import calls
from services.worker.bench import Bench, ScriptedTool
from services.worker.desk import EXECUTION

FRAME = Element(index=2, total=0, loop_id=LoopId(7), part=0, offset=0)
CLAIM = """UPDATE work SET claimed_by = '{{ idempotency_key }}'
      WHERE id IN (SELECT id FROM work
                   WHERE NOT done AND (claimed_by IS NULL OR claimed_by = '{{ idempotency_key }}')
                   ORDER BY id LIMIT {{ __frame_max_rows }} FOR UPDATE SKIP LOCKED)
      RETURNING id, name"""


@pytest.fixture
async def bench(pool: Pool, empty_database: str) -> AsyncIterator[Bench]:
    made = Bench(pool, generate_key())
    postgres = PostgresTool()
    made.tools["postgres"] = postgres
    sealed = made.keyring.encrypt("pg", {"dsn": empty_database})
    await credential.upsert(pool, "pg", kind="postgres", sealed=sealed)
    await rows_of(
        postgres,
        empty_database,
        "CREATE TABLE work (id int PRIMARY KEY, name text, claimed_by text, done bool DEFAULT 'f');"
        "INSERT INTO work (id, name) SELECT n, 'n' || n FROM generate_series(1, 5) n",
    )
    yield made
    await postgres.close()


async def rows_of(tool: PostgresTool, dsn: str, sql: str) -> Any:
    return (await calls.data(tool, config={"auth": dsn, "command": sql}))["rows"]


def loop(
    tool: str = "{kind: noop, input: {id: '{{ row.id }}', at: '{{ iter.index }}'}}",
    *,
    frame: str = "{max_rows: 3}",
    claim: str = CLAIM,
    more: str = "",
) -> str:
    return f"""
- step: a
  loop:
    cursor:
      kind: postgres
      auth: pg
      claim: |
        {" ".join(claim.split())}
    iterator: row
    spec: {{mode: cursor, frame: {frame}}}
  tool: {tool}
{more}
"""


async def frame(bench: Bench, text: str, **brief: Any) -> Done:
    end = await bench.run(text, element=FRAME, **brief)
    assert isinstance(end, Done), end
    return end


def result(end: Done) -> Any:
    return None if end.stored is None else document_of(end.stored)


async def test_a_frame_runs_the_pipeline_once_a_row(bench: Bench) -> None:
    end = await frame(bench, loop())

    assert result(end) == [{"id": 1, "at": 0}, {"id": 2, "at": 1}, {"id": 3, "at": 2}]
    assert end.frame_rows == 3


async def test_an_empty_claim_ends_the_slot_without_a_result(
    bench: Bench, empty_database: str
) -> None:
    tool = bench.answers()
    end = await frame(bench, loop(claim="UPDATE work SET done = true WHERE id > 9 RETURNING id"))

    assert (end.frame_rows, end.stored, tool.calls) == (0, None, [])


async def test_process_frame_runs_the_pipeline_once_with_all_rows(bench: Bench) -> None:
    end = await frame(
        bench,
        loop(
            "{kind: noop, input: {ids: \"{{ row | map(attribute='id') | list }}\"}}",
            frame="{max_rows: 2, process: frame}",
        ),
    )

    assert result(end) == {"ids": [1, 2]}
    assert end.frame_rows == 2


async def test_the_claim_reads_the_names_of_the_frame_and_the_input(bench: Bench) -> None:
    claim = (
        "SELECT {{ __frame_max_rows }} AS n, {{ __frame_lease_seconds }}::int AS lease,"
        " {{ iter.index }} AS frame, '{{ input.tag }}' AS tag"
    )

    end = await frame(
        bench,
        loop(
            "{kind: noop, input: {row: '{{ row }}', own: '{{ mine }}'}}",
            frame="{max_rows: 7, lease_seconds: 45}",
            claim=claim,
            more="  input: {tag: '{{ ctx.t }}', mine: '{{ row.n + 1 }}'}\n  set: {ctx.t: 1}",
        ),
        ctx={"t": "x"},
    )

    (found,) = result(end)
    assert found["row"] == {"n": 7, "lease": 45, "frame": 2, "tag": "x"}
    assert found["own"] == 8


async def test_rows_run_as_many_at_once_as_they_may(bench: Bench) -> None:
    running = most = 0

    class Counting(ScriptedTool):
        async def run(self, call: ToolCall) -> ToolResult:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.02)
            running -= 1
            return ToolResult(call.input["id"])

    bench.tools["noop"] = Counting("noop")

    end = await frame(bench, loop(frame="{max_rows: 5, row_concurrency: 2}"))

    assert most == 2
    assert result(end) == [1, 2, 3, 4, 5]


class FailsAt(ScriptedTool):
    def __init__(self, *ids: int) -> None:
        super().__init__("noop")
        self._ids = ids

    async def run(self, call: ToolCall) -> ToolResult:
        self.calls.append(call)
        if call.input["id"] in self._ids:
            return ToolResult(error=ToolError(kind="server_error", message="no", retryable=True))
        return ToolResult(call.input["id"])


async def test_the_first_row_that_fails_fails_the_frame_and_is_named(bench: Bench) -> None:
    tool = bench.tools["noop"] = FailsAt(2)

    error = await bench.error(loop(frame="{max_rows: 5}"), element=FRAME)

    assert (error.kind, error.retryable, error.details["row"]) == ("server_error", True, 1)
    assert error.message == "row 1 of the frame: no"
    assert isinstance(tool, FailsAt)
    assert len(tool.calls) == 2


async def test_a_row_whose_tool_was_cancelled_by_its_own_library_fails_the_frame(
    bench: Bench,
) -> None:
    bench.answers(1, asyncio.CancelledError(), 3)

    error = await bench.error(loop(), element=FRAME)

    assert error.kind == "internal"


async def test_best_effort_leaves_a_hole_and_counts_it(bench: Bench) -> None:
    bench.tools["noop"] = FailsAt(2)

    end = await frame(bench, loop(more="  spec: {policy: {failure: {mode: best_effort}}}"))

    document = result(end)
    assert isinstance(document, StepDocument)
    assert document.data == [1, None, 3]
    assert (document.meta["rows"], document.meta["failed"]) == (3, 1)
    assert document.meta["errors"][0]["row"] == 1
    assert end.frame_rows == 3


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_what_rows_set_in_ctx_adds_up_in_their_order(bench: Bench, concurrency: int) -> None:
    end = await frame(
        bench,
        loop(
            "{kind: noop, input: {id: '{{ row.id }}'}, set: {ctx.last: '{{ row.id }}'}}",
            frame=f"{{max_rows: 3, row_concurrency: {concurrency}}}",
        ),
    )

    assert end.ctx == {"last": 3}


async def test_rows_one_after_the_other_see_what_those_before_have_set(bench: Bench) -> None:
    end = await frame(
        bench,
        loop("{kind: noop, input: {id: '{{ row.id }}'}, set: {ctx.sum: '{{ ctx.sum + row.id }}'}}"),
        ctx={"sum": 10},
    )

    assert end.ctx == {"sum": 16}


async def test_a_claim_that_returns_nothing_of_what_it_took_is_refused(bench: Bench) -> None:
    error = await bench.error(loop(claim="UPDATE work SET done = true"), element=FRAME)

    assert error.code == "NO_ROWS_RETURNED"
    assert "RETURNING" in error.message


async def test_a_claim_that_fails_says_that_it_is_the_claim(bench: Bench) -> None:
    error = await bench.error(loop(claim="SELECT * FROM nowhere"), element=FRAME)

    assert error.code == "42P01"
    assert error.message.startswith("loop.cursor: ")


async def test_a_claim_with_an_unknown_name_says_which(bench: Bench) -> None:
    error = await bench.error(loop(claim="SELECT {{ nobody }}"), element=FRAME)

    assert error.kind == "template_rendering"
    assert "nobody" in error.message
    assert "loop.cursor" in error.message


async def test_the_next_attempt_gets_the_same_rows_by_the_key_of_the_command(bench: Bench) -> None:
    first = await frame(bench, loop())

    assert result(await frame(bench, loop())) == result(first)


async def test_each_row_has_a_key_of_its_own_that_tells_other_rows_apart(bench: Bench) -> None:
    tool = bench.answers()
    await frame(bench, loop())
    first = [call.idempotency_key for call in tool.calls]

    again = bench.answers()
    await frame(bench, loop())
    other = bench.answers()
    await frame(bench, loop(claim="SELECT id, 'other' AS name FROM work WHERE id <= 3"))

    assert len({*first}) == 3
    assert [call.idempotency_key for call in again.calls] == first
    assert not {call.idempotency_key for call in other.calls} & {*first}
    assert all(key.startswith(f"{EXECUTION}:a.1~") for key in first)


async def test_a_sink_is_written_row_by_row(bench: Bench) -> None:
    written: list[tuple[Any, str]] = []

    async def sink(plan: StepPlan, names: Names, ended: Ended, leased: Leased) -> ToolError | None:
        assert plan.sink is not None
        config: Mapping[str, Any] = await names.rendered(plan.sink, await names.step_input())
        written.append((config["args"], leased.command_id))
        return None

    bench.sink = sink

    await frame(
        bench,
        loop(more="  sink: {tool: postgres, auth: pg, table: t, args: {id: '{{ output.id }}'}}"),
    )

    assert [args for args, _ in written] == [{"id": 1}, {"id": 2}, {"id": 3}]
    assert len({command_id for _, command_id in written}) == 3


async def test_a_row_whose_sink_fails_fails_the_frame(bench: Bench) -> None:
    async def sink(plan: StepPlan, names: Names, ended: Ended, leased: Leased) -> ToolError | None:
        return ToolError(kind="db_constraint", message="twice")

    bench.sink = sink

    end = await bench.run(loop(more="  sink: {tool: postgres, auth: pg, table: t}"), element=FRAME)

    assert isinstance(end, Failed)
    assert (end.error.kind, end.error.details) == ("db_constraint", {"sink": True, "row": 0})
