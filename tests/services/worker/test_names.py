"""What templates of a command read: what the arc brought, the next page, other executions."""

import asyncio
from typing import Any

import pytest

from noetl_core.domain.brief import Element
from noetl_core.domain.envelope import Envelope, Reference
from noetl_core.domain.ids import ExecutionId, LoopId, RefId, StepName
from noetl_core.process.secrets import generate_key
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Failed
from services.worker.bench import Bench, ScriptedTool
from services.worker.desk import EXECUTION, store


@pytest.fixture
def bench(pool: Pool) -> Bench:
    return Bench(pool, generate_key())


async def test_what_the_arc_brings_goes_over_the_step_s_own_input(bench: Bench) -> None:
    document = await bench.value(
        """
- step: a
  input: {x: "{{ nowhere.x }}", y: 1}
  tool: {kind: noop, input: {z: "{{ input.x + y }}"}}
""",
        input={"x": 41},
    )

    assert document == {"x": 41, "y": 1, "z": 42}


async def test_the_next_page_goes_deeply_over_the_call(bench: Bench) -> None:
    tool = bench.answers(kind="http")

    await bench.run(
        """
- step: a
  tool: {kind: http, url: u, params: {page: 1, size: "{{ n }}"}, input: {n: 5, m: 1}}
""",
        call={"params": {"page": 2}, "input": {"n": 7}},
    )

    (call,) = tool.calls
    assert call.config == {"url": "u", "params": {"page": 2, "size": 7}}
    assert call.input == {"n": 7, "m": 1}


async def test_in_a_pipeline_the_next_page_names_the_task_it_is_for(bench: Bench) -> None:
    fetch = bench.answers(kind="http")

    await bench.run(
        """
- step: a
  tool:
    - {name: first, kind: noop, input: {page: 1}}
    - {name: fetch, kind: http, url: u, params: {page: 1}}
""",
        call={"fetch": {"params": {"page": 2}}},
    )

    first = bench.tools["noop"]
    assert isinstance(first, ScriptedTool)
    assert fetch.calls[0].config["params"] == {"page": 2}
    assert first.calls[0].input == {"page": 1}


async def test_code_can_be_gone_over_too(bench: Bench) -> None:
    tool = bench.tools["python"] = ScriptedTool("python")

    await bench.run("- step: a\n  tool: {kind: python, code: 'x = {{1}}', libs: {}}", call={"n": 1})

    assert isinstance(tool, ScriptedTool)
    assert tool.calls[0].config == {"code": "x = {{1}}", "libs": {}, "n": 1}


async def test_an_iteration_knows_the_one_that_called_its_playbook(bench: Bench) -> None:
    document = await bench.value(
        """
- step: a
  loop: {in: [], iterator: row}
  tool: {kind: noop, input: {mine: "{{ iter.row }}", theirs: "{{ iter.parent.row.id }}"}}
""",
        element=Element(index=0, total=1, loop_id=LoopId(1), part=0, offset=0, value=5),
        iter_parent={"row": {"id": 9}, "index": 2},
    )

    assert document == {"mine": 5, "theirs": 9}


async def test_the_word_parent_stays_the_user_s_own(bench: Bench) -> None:
    document = await bench.value(
        "- step: a\n  tool: {kind: noop, input: {p: '{{ parent }}'}}",
        ctx={"parent": "mine"},
        iter_parent={"index": 2},
    )

    assert document == {"p": "mine"}


async def test_the_result_of_a_child_is_read_from_its_own_execution(
    bench: Bench, pool: Pool
) -> None:
    child = ExecutionId(EXECUTION + 1)
    await store(pool, 8, b'{"n": 1}', execution_id=child)
    await store(pool, 8, b'{"n": 2}')

    def envelope(owner: ExecutionId | None) -> Envelope:
        reference = Reference(ref_id=RefId(8), type="db", execution_id=owner)
        return Envelope(status="ok", reference=reference)

    document = await bench.value(
        "- step: a\n  tool: {kind: noop, input: {x: '{{ sub.n }}', y: '{{ own.n }}'}}\n"
        "- step: sub\n  tool: {kind: noop}\n- step: own\n  tool: {kind: noop}",
        steps={StepName("sub"): envelope(child), StepName("own"): envelope(None)},
    )

    assert document == {"x": 1, "y": 2}


@pytest.mark.parametrize(
    ("more", "fails"),
    [("", True), ("\n  retry: 3", False), ("\n  loop: {in: []}", False)],
    ids=["alone", "retried", "looped"],
)
async def test_the_worker_keeps_the_time_of_a_step_that_is_one_run(
    bench: Bench, more: str, fails: bool
) -> None:
    class Slow(ScriptedTool):
        async def run(self, call: Any) -> Any:
            await asyncio.sleep(0.2)
            return await super().run(call)

    bench.tools["noop"] = Slow("noop")

    end = await bench.run(f"- step: a\n  spec: {{timeout: 0.05}}\n  tool: {{kind: noop}}{more}")

    assert isinstance(end, Failed) == fails
