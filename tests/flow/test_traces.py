"""One trace an execution, told by three services that know nothing of each other."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from chaos.stack import Stack, running_stack
from flow.conftest import PATIENT_LEASES
from noetl_core.domain import trace_ids
from noetl_core.domain.ids import CommandId, ExecutionId
from noetl_core.domain.sharding import SHARD_COUNT_DEFAULT
from support.collector import Collector, Span, running_collector

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CHILD = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: child, path: tests/traced_child}
workflow:
  - step: only
    tool: {kind: noop}
"""
PLAYBOOK = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: traced, path: tests/traced}
workflow:
  - step: first
    tool: {kind: python, code: "import time; time.sleep(0.05); result = 1"}
    next: {arcs: [{step: each}]}
  - step: each
    loop: {in: [1, 2, 3], iterator: item}
    tool: {kind: noop}
    next: {arcs: [{step: call}]}
  - step: call
    tool: {kind: playbook, path: tests/traced_child}
"""


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Collector]]:
    with (
        running_collector() as collector,
        running_stack(
            tmp_path_factory.mktemp("traced"),
            "--processes",
            **PATIENT_LEASES,
            NOETL_OTLP_ENDPOINT=collector.url,
        ) as stack,
    ):
        yield stack, collector


async def until_told(collector: Collector, execution_id: int, count: int) -> list[Span]:
    deadline = time.monotonic() + 120
    while len(found := collector.of(execution_id)) < count:
        names = sorted(one.name for one in found)
        assert time.monotonic() < deadline, names
        await asyncio.sleep(0.1)
    return found


async def test_the_spans_of_all_services_make_one_tree(traced: tuple[Stack, Collector]) -> None:
    stack, collector = traced
    await stack.register(CHILD)
    execution_id = await stack.execute(await stack.register(PLAYBOOK))
    await stack.until_projected(execution_id, "COMPLETED", seconds=60)

    # The execution, three visits, and the commands first.1, each.1/0 to 2, call.1.
    found = await until_told(collector, execution_id, 1 + 3 + 5)

    assert len(found) == 9
    assert {one.trace_id for one in found} == {
        trace_ids.trace_id(ExecutionId(execution_id)).to_bytes(16, "big")
    }
    by_id = {one.span_id: one for one in found}
    (root,) = [one for one in found if not one.parent_id]
    assert (root.service, root.name) == ("noetl-projection", "execution tests/traced")
    steps = [one for one in found if one.service == "noetl-broker"]
    assert {one.name for one in steps} == {"step first", "step each", "step call"}
    assert {one.parent_id for one in steps} == {root.span_id}
    commands = [one for one in found if one.service == "noetl-worker"]
    for command in commands:
        parent = by_id[command.parent_id]
        assert parent.name == f"step {command.attributes['noetl.step']}"
    assert sorted(one.attributes["noetl.command_id"] for one in commands) == [
        "call.1#1",
        "each.1/0#1",
        "each.1/1#1",
        "each.1/2#1",
        "first.1#1",
    ]
    slept = next(one for one in commands if one.attributes["noetl.step"] == "first")
    assert slept.end_ns - slept.start_ns >= 50_000_000
    parent = by_id[slept.parent_id]
    assert parent.start_ns <= slept.start_ns
    assert parent.end_ns >= slept.end_ns - 1_000_000


async def test_a_child_has_its_own_trace_that_points_at_its_caller(
    traced: tuple[Stack, Collector],
) -> None:
    stack, collector = traced
    await stack.register(CHILD)
    execution_id = await stack.execute(await stack.register(PLAYBOOK))
    await stack.until_projected(execution_id, "COMPLETED", seconds=60)
    (row,) = await stack.query(
        "SELECT execution_id FROM noetl.execution WHERE parent_execution_id = $1", execution_id
    )

    found = await until_told(collector, row["execution_id"], 3)

    (root,) = [one for one in found if not one.parent_id]
    parent = ExecutionId(execution_id)
    assert root.links == [
        (
            trace_ids.trace_id(parent).to_bytes(16, "big"),
            trace_ids.command_span(parent, CommandId("call.1#1")).to_bytes(8, "big"),
        )
    ]


async def test_metrics_are_there_for_who_asks_and_go_to_who_collects(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with running_collector() as collector:
        with running_stack(
            tmp_path_factory.mktemp("measured"),
            **PATIENT_LEASES,
            OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
        ) as stack:
            execution_id = await stack.execute(await stack.register(CHILD))
            await stack.until_projected(execution_id, "COMPLETED", seconds=60)
            scraped = (await stack.client.get("/metrics")).text

        owned = [line for line in scraped.splitlines() if line.startswith("noetl_shard_owner{")]
        assert len(owned) == 2 * SHARD_COUNT_DEFAULT
        assert {
            "noetl_projection_lag_ms",
            "noetl_checkpoint_age_ms",
            "noetl_event_result_bytes",
            "noetl_broker_events_total",
            "noetl_worker_commands",
            "noetl_heartbeats",
        } <= collector.metrics
