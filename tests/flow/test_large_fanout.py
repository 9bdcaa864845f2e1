"""A fan-out of a hundred thousand: the broker's memory does not grow with it, and what failed can
be run again alone."""

import asyncio
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from chaos.stack import Stack, running_stack
from flow.conftest import PATIENT_LEASES

pytestmark = [pytest.mark.slow, pytest.mark.measured, pytest.mark.timeout(2400)]

ITEMS = 100_000
FAILED = [n for n in range(ITEMS) if n % 9_973 == 7]
MEMORY_GROWTH_MAX = 50 * 1024 * 1024

SPREAD = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: spread, path: flow/spread}
workload: {count: 1}
workflow:
  - step: spread
    spec: {loop_mode: fanout, fanout: {max_shard_retries: 0}}
    loop: {in: "{{ range(workload.count) | list }}", iterator: number}
    tool:
      kind: noop
      value: "{{ iter.number }}"
      spec:
        policy:
          rules:
            - when: "{{ iter.number % 9973 == 7 and 'spread.1/' in idempotency_key }}"
              then: {do: fail}
    next:
      arcs:
        - {step: whole, when: "{{ fanin.status == 'complete' }}"}
        - {step: partly, when: "{{ fanin.status == 'partial' }}"}
  - step: whole
  - step: partly
"""


class Memory:
    """The most memory a process has had, looked at while it works."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.peak = 0

    async def watch(self) -> None:
        while True:
            self.peak = max(self.peak, self._process.memory_info().rss)
            await asyncio.sleep(0.1)


async def spread(stack: Stack, count: int) -> tuple[int, int, list[dict[str, Any]]]:
    """An execution over so many items, what the broker needed at most, and progress on the way."""
    memory = Memory(stack.pid("broker"))
    watching = asyncio.create_task(memory.watch())
    execution_id = await stack.execute("flow/spread", {"count": count})
    seen = []
    deadline = time.monotonic() + 1500
    while True:
        view = (await stack.client.get(f"/api/executions/{execution_id}")).json()
        seen.append(view.get("progress", {}).get("spread", {}))
        if view["status"] not in {"PENDING", "RUNNING"}:
            break
        assert time.monotonic() < deadline, view
        await asyncio.sleep(0.5)
    watching.cancel()
    assert view["status"] == "COMPLETED", view
    return execution_id, memory.peak, seen


async def counts(stack: Stack, execution_id: int) -> dict[str, int]:
    rows = await stack.query(
        "SELECT event_type, count(*) FROM noetl.event WHERE execution_id = $1 GROUP BY 1",
        execution_id,
    )
    return {row["event_type"]: row["count"] for row in rows}


async def test_a_hundred_thousand_items_cost_the_broker_no_more_than_a_thousand(
    tmp_path: Path,
) -> None:
    options = ("--processes", "--workers", "2")
    with running_stack(tmp_path / "data", *options, **PATIENT_LEASES) as stack:
        await stack.register(SPREAD)
        _, small, _ = await spread(stack, 1_000)
        begun = time.monotonic()
        execution_id, large, seen = await spread(stack, ITEMS)
        seconds = time.monotonic() - begun

        assert large - small < MEMORY_GROWTH_MAX, (small, large)
        on_the_way = [p for p in seen if p.get("status") == "RUNNING" and p.get("total") == ITEMS]
        assert [p["done"] for p in on_the_way] == sorted(p["done"] for p in on_the_way)
        assert any(0 < p["done"] < ITEMS for p in on_the_way)

        events = await counts(stack, execution_id)
        assert events["loop.shard.enqueued"] == events["command.issued"] == ITEMS
        assert events["loop.shard.done"] == ITEMS - len(FAILED)
        assert events["loop.shard.failed"] == len(FAILED)
        assert events["loop.fanin.completed"] == 1
        assert (await steps(stack, execution_id)) == {"spread", "partly"}

        begun = time.monotonic()
        await retry_failed(stack, execution_id)
        again = time.monotonic() - begun
        events = await counts(stack, execution_id)
        assert events["command.issued"] == ITEMS + len(FAILED)
        assert events["loop.shard.done"] == ITEMS
        path = f"/api/executions/{execution_id}/steps/spread/result"
        assert (await stack.client.get(path, timeout=60)).json() == list(range(ITEMS))
    print(
        f"\nfan-out of {ITEMS}: {seconds:.1f} s, {ITEMS / seconds:.0f} items/s, broker "
        f"{small / 2**20:.0f} MB at 1,000 and {large / 2**20:.0f} MB at {ITEMS}; "
        f"the {len(FAILED)} failed ones again: {again:.1f} s"
    )


async def retry_failed(stack: Stack, execution_id: int) -> None:
    answer = await stack.client.post(
        f"/api/executions/{execution_id}/retry", json={"step": "spread"}
    )
    assert answer.status_code == 202, answer.text
    deadline = time.monotonic() + 240
    while "whole" not in await steps(stack, execution_id):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    await stack.until_projected(execution_id, "COMPLETED", seconds=240)


async def steps(stack: Stack, execution_id: int) -> set[str]:
    rows = await stack.query(
        "SELECT DISTINCT node_name FROM noetl.event "
        "WHERE execution_id = $1 AND event_type = 'step.enter'",
        execution_id,
    )
    return {row["node_name"] for row in rows}
