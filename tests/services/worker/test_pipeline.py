"""What the tasks of a step do in turn, and what their policy rules make of it."""

import asyncio
import time
from typing import Any

import pytest

from noetl_core.domain.brief import Brief, Element, encode_brief
from noetl_core.domain.envelope import Envelope
from noetl_core.domain.errors import ToolError
from noetl_core.domain.ids import (
    CatalogId,
    CommandId,
    ExecutionId,
    LoopId,
    ShardId,
    StepName,
)
from noetl_core.domain.playbook import Action
from noetl_core.domain.result_view import StepDocument
from noetl_core.process.secrets import generate_key
from noetl_core.store import credential
from noetl_core.store.command import Leased
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Done, Failed
from noetl_worker import pipeline as pipeline_module
from noetl_worker.tools.tool import ToolCall, ToolResult
from services.worker.bench import Bench, ScriptedTool
from services.worker.desk import EXECUTION, store

BUSY = ToolError(
    kind="rate_limit", message="slow down", retryable=True, details={"http": {"status": 429}}
)


@pytest.fixture
def bench(pool: Pool) -> Bench:
    return Bench(pool, generate_key())


async def test_a_single_task_is_stored_as_its_bare_value(bench: Bench) -> None:
    bench.answers([1, 2])

    assert await bench.value("- step: a\n  tool: {kind: noop}") == [1, 2]


async def test_nothing_is_stored_as_nothing(bench: Bench) -> None:
    end = await bench.run("- step: a\n  tool: {kind: noop}")

    assert isinstance(end, Done)
    assert end.stored is None


async def test_a_pipeline_passes_each_result_on_and_keeps_them_all(bench: Bench) -> None:
    bench.answers({"n": 1}, kind="http")

    document = await bench.value(
        """
- step: a
  tool:
    - {name: fetch, kind: http, url: "http://x"}
    - kind: noop
      input: {prev: "{{ _prev.n }}", named: "{{ fetch.n + 1 }}", all: "{{ results.fetch.n + 2 }}"}
    - {last: {kind: noop, input: {t: "{{ _task }}", n: "{{ task_1.prev }}"}}}
"""
    )

    assert document == StepDocument(
        data={"t": "last", "n": 1},
        task="last",
        earlier={"fetch": {"n": 1}, "task_1": {"prev": 1, "named": 2, "all": 3}},
    )


async def test_input_is_rendered_from_everything_a_worker_knows(bench: Bench, pool: Pool) -> None:
    rows = await store(pool, 8, b'{"rows": [{"id": 5}]}')
    payload = await store(pool, 9, b'{"api": {"host": "h"}}')

    document = await bench.value(
        """
- step: a
  loop: {in: [], iterator: row}
  input: {whole: "{{ ctx.n + 1 }}", text: "n={{ n }}", id: "{{ load.rows[0].id }}"}
  tool:
    kind: noop
    input: {own: "{{ whole }}", row: "{{ row.k }}/{{ iter.index }}", host: "{{ api.host }}"}
  set: {ctx.n: 1}
- step: load
  tool: {kind: noop}
""",
        ctx={"n": 1},
        steps={StepName("load"): rows},
        payload=payload,
        element=Element(index=3, total=4, loop_id=LoopId(1), part=0, offset=3, value={"k": "v"}),
    )

    assert document == {
        "whole": 2,
        "text": "n=1",
        "id": 5,
        "own": 2,
        "row": "v/3",
        "host": "h",
    }


async def test_a_large_element_is_read_from_its_part(bench: Bench, pool: Pool) -> None:
    await pool.execute(
        "INSERT INTO noetl.manifest_part (execution_id, manifest_id, part_index, item_count,"
        " store_tier, bytes, inline) VALUES ($1, 10, 2, 2, 'db', 9, '[\"a\",\"b\"]')",
        EXECUTION,
    )

    document = await bench.value(
        "- step: a\n  loop: {in: [], iterator: x}\n  tool: {kind: noop, input: {x: '{{ x }}'}}",
        element=Element(index=9, total=9, loop_id=LoopId(10), part=2, offset=1, is_inline=False),
    )

    assert document == {"x": "b"}


async def test_a_retry_rule_tries_again_and_every_attempt_is_visible(bench: Bench) -> None:
    tool = bench.answers(ToolResult(error=BUSY), ToolResult(error=BUSY), {"ok": 1})

    document = await bench.value(
        """
- step: a
  tool:
    kind: noop
    input: {n: "{{ _attempt }}"}
    spec:
      policy:
        rules:
          - when: "{{ output.status == 'error' and output.http.status in [429, 503] }}"
            then: {do: retry, attempts: 5, delay: 0}
"""
    )

    assert document.data == {"ok": 1}
    assert [call.input["n"] for call in tool.calls] == [1, 2, 3]
    assert [a["status"] for a in document.meta["attempts"]] == ["error", "error", "ok"]


async def test_retries_end_with_the_error_when_their_number_is_used_up(bench: Bench) -> None:
    tool = bench.answers(*[ToolResult(error=BUSY)] * 9)

    error = await bench.error(
        """
- step: a
  tool:
    kind: noop
    spec: {policy: {rules: [{else: {do: retry, attempts: 3}}]}}
"""
    )

    assert error.kind == "rate_limit"
    assert len(tool.calls) == 3


async def test_a_server_that_says_when_to_come_back_is_believed(bench: Bench) -> None:
    patient = ToolError(kind="rate_limit", message="", details={"retry_after": 0.3})
    bench.answers(ToolResult(error=patient), 1)
    started = time.monotonic()

    await bench.value(
        """
- step: a
  tool:
    kind: noop
    spec: {policy: {rules: [{when: "{{ error.kind == 'rate_limit' }}", then: {do: retry}}]}}
"""
    )

    assert 0.3 <= time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("backoff", "delays"),
    [("fixed", [2, 2, 2]), ("linear", [2, 4, 6]), ("exponential", [2, 4, 8])],
)
def test_a_delay_grows_as_the_rule_says(backoff: Any, delays: list[float]) -> None:
    action = Action(do="retry", delay=2.0, backoff=backoff)

    assert [pipeline_module._delay(action, n, None) for n in (1, 2, 3)] == delays


async def test_a_jump_goes_back_with_what_was_set_in_iter(bench: Bench) -> None:
    tool = bench.answers(kind="http")

    document = await bench.value(
        """
- step: a
  loop: {in: []}
  tool:
    - name: start
      kind: noop
      set: {iter.page: 1}
    - name: fetch
      kind: http
      url: x
      input: {page: "{{ iter.page }}"}
      spec:
        policy:
          rules:
            - when: "{{ iter.page < 3 }}"
              then: {do: jump, to: fetch, set: {iter.page: "{{ iter.page + 1 }}"}}
""",
        element=Element(index=0, total=1, loop_id=LoopId(1), part=0, offset=0, value=1),
    )

    assert [call.input["page"] for call in tool.calls] == [1, 2, 3]
    assert document.data == {"page": 3}


async def test_an_endless_jump_is_stopped(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_module, "JUMPS_MAX", 20)

    error = await bench.error(
        """
- step: a
  tool:
    - {name: x, kind: noop}
    - {kind: noop, spec: {policy: {rules: [{else: {do: jump, to: previous}}]}}}
"""
    )

    assert error.kind == "jump_limit"


async def test_break_ends_well_and_the_rest_does_not_run(bench: Bench) -> None:
    bench.answers(ToolResult({"half": 1}, error=BUSY))
    after = bench.answers(kind="http")

    document = await bench.value(
        """
- step: a
  tool:
    - {name: x, kind: noop, spec: {policy: {rules: [{else: {then: {do: break}}}]}}}
    - {kind: http, url: x}
"""
    )

    assert document.data == {"half": 1}
    assert after.calls == []


async def test_continue_goes_past_an_error_and_fail_makes_one_of_a_success(bench: Bench) -> None:
    bench.answers(ToolResult(error=BUSY), {"n": 2})

    error = await bench.error(
        """
- step: a
  tool:
    - {name: x, kind: noop, spec: {policy: {rules: [{else: {do: continue}}]}}}
    - name: y
      kind: noop
      spec: {policy: {rules: [{when: "{{ output.data.n == 2 }}", then: {do: fail}}]}}
"""
    )

    assert error.kind == "policy"
    assert "'y'" in error.message


async def test_what_tasks_set_in_ctx_is_seen_by_the_next_and_reported(bench: Bench) -> None:
    bench.answers({"status_code": 200, "data": {"k": 7}}, kind="http")

    end = await bench.run(
        """
- step: a
  tool:
    - {name: x, kind: http, url: u, set: {ctx.got.k: "{{ output.data.k }}", iter.private: 1}}
    - name: y
      kind: noop
      input: {k: "{{ ctx.got.k + 1 }}"}
      spec: {policy: {rules: [{else: {do: continue, set: {ctx.last: "{{ output.k }}"}}}]}}
"""
    )

    assert isinstance(end, Done)
    assert end.ctx == {"got.k": 7, "last": 8}


async def test_a_template_error_names_step_field_and_name(bench: Bench) -> None:
    error = await bench.error(
        "- step: a\n  tool: {kind: http, url: 'http://{{ workload.hots }}/x'}"
    )

    assert error.kind == "template_rendering"
    assert error.details == {"step": "a", "field": "tool.url", "name": "hots"}
    assert "workload.hots" in error.message


async def test_a_guard_that_cannot_be_evaluated_fails_the_command(bench: Bench) -> None:
    error = await bench.error(
        """
- step: a
  tool:
    kind: noop
    spec: {policy: {rules: [{when: "{{ output.nothing.here }}", then: {do: continue}}]}}
"""
    )

    assert error.kind == "template_rendering"
    assert error.details["field"] == "tool.spec.policy.rules[0].when"


async def test_a_result_that_is_gone_is_a_missing_reference(bench: Bench, pool: Pool) -> None:
    rows = await store(pool, 8, b"1")
    await pool.execute("DELETE FROM noetl.result_ref")

    error = await bench.error(
        "- step: a\n  tool: {kind: noop, input: {x: '{{ load.rows }}'}}\n"
        "- step: load\n  tool: {kind: noop}",
        steps={StepName("load"): rows},
    )

    assert (error.kind, error.code) == ("missing_reference", "REFERENCE_NOT_AVAILABLE")


async def test_fields_that_the_broker_routes_on_are_pushed(bench: Bench) -> None:
    bench.answers({"total": 3, "token": "s3cret", "big": "x" * 5000, "rows": [{"id": 1}]})

    end = await bench.run(
        """
- step: a
  tool: {kind: noop}
  next:
    arcs:
      - {step: b, when: "{{ output.data.total > 0 and a.rows[0].id and output.token }}"}
      - {step: b, when: "{{ a.big or output.data.nothing | default(1) }}"}
- step: b
  tool: {kind: noop}
"""
    )

    assert isinstance(end, Done)
    assert end.context == {"data.total": 3, "rows": [{"id": 1}]}


async def test_a_late_task_and_a_late_step_time_out(bench: Bench) -> None:
    class Slow(ScriptedTool):
        async def run(self, call: ToolCall) -> ToolResult:
            await asyncio.sleep(30)
            return ToolResult(call)

    bench.tools["noop"] = Slow("noop")

    task = await bench.error("- step: a\n  tool: {kind: noop, timeout: 0.05}")
    step = await bench.error("- step: a\n  spec: {timeout: 0.05}\n  tool: {kind: noop}")

    assert task.kind == step.kind == "timeout"
    assert task.retryable


async def test_a_broken_tool_fails_its_command_and_nothing_else(bench: Bench) -> None:
    bench.answers(RuntimeError("a bug"))

    error = await bench.error("- step: a\n  tool: {kind: noop}")

    assert error.kind == "internal"
    assert "a bug" in error.message


async def test_an_unknown_playbook_or_tool_is_said(bench: Bench) -> None:
    bench.tools.pop("noop")
    no_tool = await bench.error("- step: a\n  tool: {kind: noop}")
    gone = await bench.performer().perform(
        Leased(
            ExecutionId(1),
            CommandId("a.1#1"),
            ShardId(0),
            StepName("a"),
            1,
            "cpu",
            encode_brief(Brief(catalog_id=CatalogId(99), step=StepName("a"), visit=1, attempt=1)),
        )
    )

    assert no_tool.code == "NO_TOOL"
    assert isinstance(gone, Failed)
    assert "not in the catalog" in gone.error.message


async def test_a_keychain_value_reaches_the_tool_and_never_an_error(bench: Bench) -> None:
    sealed = bench.keyring.encrypt("api", {"token": "hunter2-token"})
    await credential.upsert(bench.pool, "api", kind="bearer", sealed=sealed)
    tool = bench.answers(
        ToolResult(error=ToolError(kind="auth", message="refused hunter2-token")), kind="http"
    )

    error = await bench.error(
        "- step: a\n  tool: {kind: http, url: u, headers: {x: '{{ keychain.api.token }}'}}"
    )

    assert tool.calls[0].config["headers"] == {"x": "hunter2-token"}
    assert error.message == "refused ***"


async def test_a_credential_that_is_not_there_is_an_auth_error(bench: Bench) -> None:
    error = await bench.error("- step: a\n  tool: {kind: http, url: '{{ keychain.nobody.url }}'}")

    assert (error.kind, error.code) == ("auth", "CREDENTIAL_NOT_FOUND")


async def test_a_result_that_is_no_data_fails_with_a_reason(bench: Bench) -> None:
    bench.answers(ToolResult({"x": object()}))

    error = await bench.error("- step: a\n  tool: {kind: noop}")

    assert error.code == "NOT_JSON"


async def test_every_attempt_has_the_same_idempotency_key(bench: Bench) -> None:
    tool = bench.answers()

    await bench.run("- step: a\n  tool: {kind: noop, input: {k: '{{ idempotency_key }}'}}")

    assert tool.calls[0].input["k"] == tool.calls[0].idempotency_key == f"{EXECUTION}:a.1"


async def test_a_failed_step_is_seen_with_its_status(bench: Bench) -> None:
    document = await bench.value(
        "- step: a\n  tool: {kind: noop, input: {s: '{{ load.status }}'}}\n"
        "- step: load\n  tool: {kind: noop}",
        steps={StepName("load"): Envelope(status="error")},
    )

    assert document == {"s": "error"}
