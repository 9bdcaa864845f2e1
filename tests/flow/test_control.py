"""Executions that are steered from outside, with every service at work in this process."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from flow.test_tour import a_gateway
from noetl_broker.config import BrokerConfig
from noetl_broker.main import start as start_broker
from noetl_core.bus.connection import Bus
from noetl_core.process.service import Service, serving
from noetl_core.store.postgres import Pool
from noetl_projection.config import ProjectionConfig
from noetl_projection.main import start as start_projection
from noetl_reaper.config import ReaperConfig
from noetl_reaper.main import start as start_reaper
from noetl_worker.config import WorkerConfig
from noetl_worker.main import start as start_worker

LOOP = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: halves}
workload: {flag: ""}
workflow:
  - step: list
    tool: {kind: noop, value: [0, 1, 2, 3, 4, 5]}
    set: {ctx.source: list}
    next: {arcs: [{step: each}]}
  - step: each
    loop: {in: "{{ list }}", iterator: item, spec: {mode: parallel}}
    spec: {policy: {failure: {mode: best_effort}}}
    tool:
      kind: python
      input: {item: "{{ item }}", flag: "{{ workload.flag }}"}
      code: |
        import pathlib
        if item % 2 and not pathlib.Path(flag).exists():
            raise ValueError("not yet")
        result = item * 10
    next:
      arcs:
        - {step: broken, when: "{{ each.stats.failed > 0 }}"}
        - {step: sum}
  - step: broken
    tool: {kind: fail, message: some items failed}
  - step: sum
    tool: {kind: noop, value: "{{ each.results | sum }} from {{ ctx.source }}"}
"""

CHILD = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: child}
workflow:
  - step: nap
    tool: {kind: wait, seconds: 2}
    next: {arcs: [{step: answer}]}
  - step: answer
    tool: {kind: noop, value: {text: "child of {{ workload.name }}"}}
"""

PARENT = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: parent}
workflow:
  - step: ask
    tool: {kind: playbook, path: child, input: {name: nobody}, return_step: answer}
    next: {arcs: [{step: sign}]}
  - step: sign
    tool: {kind: approval, message: is it fine?, approvers: [ada]}
    next: {arcs: [{step: tell}]}
  - step: tell
    tool: {kind: noop, value: "{{ ask.text }}, signed: {{ sign.note }}"}
"""

SLOW = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: slow}
workflow:
  - step: stand
    spec: {timeout: 0.5s}
    tool: {kind: wait, signal: never}
"""


@pytest.fixture
async def client(
    pool: Pool, bus: Bus, database: str, nats_url: str
) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway in front of a broker, a projection, a worker and a reaper."""
    places: Any = {"postgres_dsn": database, "nats_url": nats_url}
    parts: list[tuple[Service[Any], Any]] = [
        (Service("broker", BrokerConfig(**places)), start_broker),
        (Service("projection", ProjectionConfig(**places)), start_projection),
        (Service("worker", WorkerConfig(**places, python_processes=1)), start_worker),
        (Service("reaper", ReaperConfig(**places)), start_reaper),
    ]
    async with AsyncExitStack() as stack:
        for service, start in parts:
            await stack.enter_async_context(serving(service, start))
        yield await stack.enter_async_context(a_gateway(pool, bus))


async def begin(client: httpx.AsyncClient, content: str, **payload: Any) -> str:
    entry = (await client.post("/api/catalog/register", json={"content": content})).json()
    request = {"path": entry["path"], "payload": payload}
    answer = await client.post("/api/execute", json=request)
    execution_id: str = answer.json()["execution_id"]
    return execution_id


async def tell(client: httpx.AsyncClient, execution_id: str, wish: str, **body: Any) -> str:
    answer = await client.post(f"/api/executions/{execution_id}/{wish}", json=body)
    assert answer.status_code == 202, answer.text
    about: str = answer.json()["execution_id"]
    return about


async def until(
    client: httpx.AsyncClient, execution_id: str, *, past: str = "", **fields: str
) -> dict[str, Any]:
    """The status as soon as each field contains what it should, `past` that event."""
    deadline = time.monotonic() + 60
    while True:
        view: dict[str, Any] = (await client.get(f"/api/executions/{execution_id}")).json()
        is_so = all(text in (view[name] or "") for name, text in fields.items())
        if is_so and view["last_event_id"] != past:
            return view
        assert time.monotonic() < deadline, view
        await asyncio.sleep(0.02)


async def results(client: httpx.AsyncClient, execution_id: str) -> dict[str, Any]:
    steps = (await client.get(f"/api/executions/{execution_id}/steps")).json()
    return {name: step["result"] for name, step in steps.items()}


async def calls(pool: Pool, execution_id: str, step: str) -> int:
    count: int = await pool.fetchval(
        "SELECT count(*) FROM noetl.event WHERE execution_id = $1"
        " AND event_type = 'command.issued' AND node_name = $2",
        int(execution_id),
        step,
    )
    return count


async def test_a_retry_runs_what_failed_and_keeps_what_did_not(
    client: httpx.AsyncClient, pool: Pool, tmp_path: Path
) -> None:
    flag = tmp_path / "flag"
    execution_id = await begin(client, LOOP, flag=str(flag))
    failed = await until(client, execution_id, status="FAILED")
    flag.touch()

    await tell(client, execution_id, "retry", step="each")
    done = await until(client, execution_id, status="COMPLETED")

    assert failed["progress"]["each"]["failed"] == 3
    assert await calls(pool, execution_id, "each") == 6 + 3
    assert await calls(pool, execution_id, "list") == 1
    assert (await results(client, execution_id))["sum"] == "150 from list"
    assert done["ended_at"] > failed["ended_at"]
    assert done["error"] is None


async def test_a_retry_of_all_items_runs_them_all(
    client: httpx.AsyncClient, pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "flag").touch()
    execution_id = await begin(client, LOOP, flag=str(tmp_path / "flag"))
    first = await until(client, execution_id, status="COMPLETED")

    await tell(client, execution_id, "retry", step="each", items="all")
    await until(client, execution_id, past=first["last_event_id"], status="COMPLETED")

    assert await calls(pool, execution_id, "each") == 12


async def test_a_fork_reads_the_results_of_its_origin_where_they_are(
    client: httpx.AsyncClient, pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "flag").touch()
    execution_id = await begin(client, LOOP, flag=str(tmp_path / "flag"))
    await until(client, execution_id, status="COMPLETED")

    at_loop = await tell(client, execution_id, "fork", step="each")
    after_loop = await tell(client, execution_id, "fork", step="sum")
    await until(client, after_loop, status="COMPLETED")
    again = await tell(client, after_loop, "fork", step="sum")
    for forked in (at_loop, after_loop, again):
        await until(client, forked, status="COMPLETED")

    for forked in (at_loop, after_loop, again):
        assert (await results(client, forked))["sum"] == "150 from list"
        assert await calls(pool, forked, "list") == 0
    assert await calls(pool, at_loop, "each") == 6
    assert await calls(pool, after_loop, "each") == 0


async def test_a_child_waits_by_a_timer_its_parent_for_it_and_then_for_an_approval(
    client: httpx.AsyncClient,
) -> None:
    await client.post("/api/catalog/register", json={"content": CHILD})
    parent = await begin(client, PARENT)

    waiting = await until(client, parent, waiting_on="waits for the child execution")
    child = waiting["waiting_on"].split()[-1]
    await until(client, child, waiting_on="step `nap` waits until")
    await until(client, parent, waiting_on="waits for an approval by ada")
    refused = await client.post(f"/api/executions/{parent}/signal", json={"name": "sign"})
    await tell(client, parent, "signal", name="sign", by="ada", data={"note": "yes"})
    await until(client, parent, status="COMPLETED")

    assert refused.status_code == 422
    children = (await client.get(f"/api/executions/{parent}/children")).json()["items"]
    assert [(one["execution_id"], one["status"]) for one in children] == [(child, "COMPLETED")]
    assert children[0]["parent_execution_id"] == parent
    assert (await results(client, parent))["tell"] == "child of nobody, signed: yes"


async def test_a_rerun_of_a_child_stands_alone_with_the_same_payload(
    client: httpx.AsyncClient,
) -> None:
    await client.post("/api/catalog/register", json={"content": CHILD})
    parent = await begin(client, PARENT)
    await until(client, parent, waiting_on="waits for an approval")
    (child,) = (await client.get(f"/api/executions/{parent}/children")).json()["items"]

    alone = await tell(client, child["execution_id"], "rerun")
    view = await until(client, alone, status="COMPLETED")

    assert view["parent_execution_id"] is None
    assert (await results(client, alone))["answer"] == {"text": "child of nobody"}


async def test_a_paused_execution_begins_nothing_though_its_wait_is_over(
    client: httpx.AsyncClient, pool: Pool
) -> None:
    # Time enough to see that it waits, and to pause it before that is over.
    longer = CHILD.replace("seconds: 2", "seconds: 5")
    execution_id = await begin(client, longer, name="me")
    await until(client, execution_id, waiting_on="waits until")

    await tell(client, execution_id, "pause", reason="look first")
    paused = await until(client, execution_id, status="PAUSED")
    await asyncio.sleep(5.3)
    still = await until(client, execution_id, status="PAUSED")
    await tell(client, execution_id, "resume")
    await until(client, execution_id, status="COMPLETED")

    assert f"noetl resume {execution_id}" in paused["waiting_on"]
    assert still["progress"].get("answer", {}).get("status") != "COMPLETED"
    assert (await results(client, execution_id))["answer"] == {"text": "child of me"}


async def test_a_step_that_waits_too_long_is_ended_by_its_timer(
    client: httpx.AsyncClient, pool: Pool
) -> None:
    begun = time.monotonic()
    execution_id = await begin(client, SLOW)

    view = await until(client, execution_id, status="FAILED")

    assert view["error"]["kind"] == "timeout"
    assert time.monotonic() - begun < 15
    assert await pool.fetchval("SELECT count(*) FROM noetl.timer") == 0
