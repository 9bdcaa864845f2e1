"""What a client reads of an execution is the same, byte for byte, when it is in an archive."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from chaos.stack import running_stack
from noetl_compactor.archive import Rules, archive_past
from noetl_compactor.expire import Backlog, expire
from noetl_core.blob.place import Place
from noetl_core.domain.retention import DAY_MS
from noetl_core.domain.snowflake import Snowflake
from noetl_core.process.clock import unix_ms
from noetl_core.store.postgres import open_pool
from support.flow import Flow
from support.mock_api import Clinic, running_mock_api

from .conftest import PATIENT_LEASES

pytestmark = pytest.mark.slow

_mint = Snowflake(node=9, now_ms=unix_ms).mint

# Loops, fan-out with failures, pages, pages within loops, children, arcs, retries, chunks, items
# that return nothing, cursors.
PLAYBOOKS: dict[str, Any] = {
    "arcs": "COMPLETED",
    "collections": "COMPLETED",
    "fanout_partial_failure": "COMPLETED",
    "pagination": "COMPLETED",
    "loop_with_pagination": "COMPLETED",
    "nested_outer": "COMPLETED",
    "streaming_chunks": "COMPLETED",
    "edited": "COMPLETED",
    "forgetful": "COMPLETED",
    "silent": "COMPLETED",
    "work_queue": "COMPLETED",
}
LOOP_ITEMS = 600
"""More than a gateway reads of a loop with one statement, and more than a page of events."""


@pytest.fixture
async def own_flow(tmp_path: Path, place_environment: dict[str, str]) -> AsyncIterator[Flow]:
    environment = {**PATIENT_LEASES, **place_environment}
    with (
        running_mock_api(Clinic(facilities=2, patients=2)) as api,
        running_stack(tmp_path, **environment) as stack,
    ):
        flow = Flow(stack, api)
        await flow.prepare()
        yield flow
        await stack.client.aclose()


async def bodies(flow: Flow, execution_id: int) -> dict[str, bytes]:
    """Every answer about an execution, as the bytes that came."""
    base = f"/api/executions/{execution_id}"
    steps = (await flow.stack.client.get(f"{base}/steps")).json()
    paths = [base, f"{base}/steps", f"{base}/children", f"{base}/events?limit=1000"]
    for step, view in steps.items():
        paths += [f"{base}/trace/{step}", f"{base}/steps/{step}/result"]
        assert view is not None
    found = {}
    for path in paths:
        answer = await flow.stack.client.get(path)
        found[path] = str(answer.status_code).encode() + b" " + answer.content
    return found | await pages_of_events(flow, base)


async def pages_of_events(flow: Flow, base: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    after: str | None = "0"
    while after is not None:
        path = f"{base}/events?limit=100&after={after}"
        answer = await flow.stack.client.get(path)
        found[path] = answer.content
        after = answer.json()["next_after"]
    return found


async def test_every_answer_is_the_same_after_the_drop(own_flow: Flow, place: Place) -> None:
    executions = []
    for playbook in PLAYBOOKS:
        execution_id = await own_flow.start(playbook)
        await tell(own_flow, execution_id, "go")
        await own_flow.stack.until_ended(execution_id)
        executions += [execution_id, *await own_flow.children(execution_id)]
    looped = await own_flow.start("collections", items=list(range(LOOP_ITEMS)))
    await own_flow.stack.until_ended(looped)
    executions.append(looped)
    for execution_id in executions:
        await own_flow._read(execution_id)
    await expire_all(own_flow)
    before = {one: await bodies(own_flow, one) for one in executions}
    events = await own_flow.stack.query("SELECT count(*) FROM noetl.event")

    archived = await archive_all(own_flow, place)

    assert archived == events[0]["count"]
    assert (await own_flow.stack.query("SELECT count(*) FROM noetl.event"))[0]["count"] == 0
    assert (await own_flow.stack.query("SELECT count(*) FROM noetl.result_ref"))[0]["count"] == 0
    for one in executions:
        after = await bodies(own_flow, one)
        for path, body in before[one].items():
            assert after[path] == body, path
    assert len([path for path in before[looped] if "/events?limit=100&" in path]) > 10
    whole = json.loads(before[looped][f"/api/executions/{looped}/steps/each/result"][4:])
    assert whole == list(range(LOOP_ITEMS))
    bodies_of_traces = [
        body for found in before.values() for path, body in found.items() if "/trace/" in path
    ]
    traces = [json.loads(body[4:]) for body in bodies_of_traces if body.startswith(b"200")]
    assert len(traces) > len(executions)
    assert all(trace["is_complete"] for trace in traces)
    assert max(len(trace["links"]) for trace in traces) > 2
    kinds = {link["type"] for trace in traces for link in trace["links"]}
    assert kinds >= {"db", "eventlog", "pages"}


async def tell(flow: Flow, execution_id: int, signal: str) -> None:
    """Whoever does not wait for it keeps it."""
    await flow.stack.client.post(f"/api/executions/{execution_id}/signal", json={"name": signal})


async def expire_all(flow: Flow) -> None:
    """What has a time to live keeps its execution until that is over and the payload removed."""
    living = "SELECT 1 FROM noetl.result_ref WHERE expires_at IS NOT NULL AND removed_at IS NULL"
    dsn = flow.stack.info["dsn"]
    async with (
        asyncio.timeout(60),
        open_pool(dsn, role="noetl_compactor", size_max=2) as pool,
    ):
        while await pool.fetch(living):
            await expire(pool, {}, Backlog())
            await asyncio.sleep(0.1)


async def archive_all(flow: Flow, place: Place) -> int:
    """Until nothing is left: an autovacuum may be in the way of a drop, which then waits for the
    next turn."""
    archived = await archive_once(flow, place)
    async with asyncio.timeout(120):
        while await flow.stack.query("SELECT FROM noetl.event LIMIT 1"):
            await asyncio.sleep(0.5)
            archived += await archive_once(flow, place)
    return archived


async def archive_once(flow: Flow, place: Place) -> int:
    """As the compactor will when all of this is past retention."""
    rules = Rules(place, _mint, unix_ms() + 15 * DAY_MS)
    async with open_pool(flow.stack.info["dsn"], role="noetl_compactor", size_max=2) as pool:
        return await archive_past(pool, rules)


async def test_an_archived_execution_runs_again_but_does_not_go_on(
    own_flow: Flow, place: Place
) -> None:
    execution_id = await own_flow.start("arcs")
    await own_flow.stack.until_ended(execution_id)
    await own_flow._read(execution_id)
    await archive_all(own_flow, place)
    post = own_flow.stack.client.post

    retried = await post(f"/api/executions/{execution_id}/retry", json={"step": "start"})
    again = await post(f"/api/executions/{execution_id}/rerun", json={})

    assert retried.status_code == 409, retried.text
    assert "in an archive" in retried.json()["detail"]
    assert again.status_code == 202, again.text
    await own_flow.ended(int(again.json()["execution_id"]))


async def test_what_runs_goes_on_while_everything_else_is_archived(
    own_flow: Flow, place: Place
) -> None:
    waiting = await own_flow.start("waiting")
    await own_flow.until(waiting, "command.parked", step="listen")
    ended = await own_flow.start("arcs")
    await own_flow.stack.until_ended(ended)
    await own_flow._read(ended)

    busy = [await own_flow.start("nested_outer") for _ in range(4)]
    for _ in range(6):
        await archive_once(own_flow, place)
        await asyncio.sleep(0.5)
    await own_flow.signal(waiting, "news", data={"text": "it"})
    await own_flow.until(waiting, "command.parked", step="ask")
    await own_flow.signal(waiting, "ask", by="ann", data={"reason": "why not"})

    await own_flow.ended(waiting)
    for execution_id in busy:
        answer = await own_flow.stack.client.get(
            f"/api/executions/{execution_id}?wait=60", timeout=120
        )
        assert answer.json()["status"] == "COMPLETED"
    for execution_id in (ended, waiting, *busy):
        log = await own_flow.stack.client.get(f"/api/executions/{execution_id}/events?limit=1000")
        keys = [item["event_type"] for item in log.json()["items"]]
        assert keys[0] == "execution.started"
        assert keys.count("execution.completed") == 1
    archived = await own_flow.stack.query(
        "SELECT sum(item_count) FROM noetl.manifest WHERE kind = 'archive'"
    )
    assert archived[0]["sum"] > 0
