"""Executions in an archive in S3: the same answers, and a clear word while S3 is away."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest

from noetl_api_gateway.app import build_app
from noetl_api_gateway.endpoint import Gateway
from noetl_compactor.archive import archive_past
from noetl_core.blob import ResultStore
from noetl_core.blob.s3_place import S3Place
from noetl_core.domain.state import StepState
from noetl_core.store.postgres import Pool, open_pool
from services.compactor.old_log import rules
from support.s3 import SECRET_KEY, Gate, Mood, open_s3_place

from .given import a_result, an_event, an_execution
from .test_trace_api import a_call, an_envelope

BASE = "/api/executions/5"
PATHS = [
    f"{BASE}/events",
    f"{BASE}/steps",
    f"{BASE}/steps/load/result",
    f"{BASE}/steps/each/result",
    f"{BASE}/trace/load",
]


@pytest.fixture
async def client(
    gateway: Gateway, gate: Gate, s3_place: S3Place, pool: Pool, database: str
) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway that finds its archives behind the gate; the execution 5 is in one."""
    await a_finished_execution(pool)
    async with (
        open_pool(database, role="noetl_compactor", size_max=2) as compactor_pool,
        open_s3_place(gate.url, s3_place.location, timeout_seconds=5.0) as place,
    ):
        app = build_app(replace(gateway, results=ResultStore(archives=place)))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as opened:
            before = {path: (await opened.get(path)).content for path in PATHS}
            assert await archive_past(compactor_pool, rules(s3_place)) == 5
            yield opened
            await gate.become("open")
            after = {path: (await opened.get(path)).content for path in PATHS}
            assert after == before


async def a_finished_execution(pool: Pool) -> None:
    first = await a_call(pool, 5, None)
    second = await a_call(pool, 5, first)
    for index in range(3):
        envelope = {"status": "ok"}
        event_id = await an_event(
            pool, 5, event_type="call.done", loop_id=77, iter_index=index, result=envelope
        )
        await a_result(pool, 5, event_id, b'{"item": %d}' % index)
    steps = {
        "load": StepState(status="COMPLETED", visit=1, result=an_envelope(second, first)),
        "each": StepState(
            status="COMPLETED", visit=1, result=an_envelope(77, second, kind="eventlog")
        ),
    }
    await an_execution(pool, 5, status="COMPLETED", steps=steps)
    await pool.execute("UPDATE noetl.execution SET last_projected_event_id = 1000000")
    await pool.execute(
        "INSERT INTO noetl.manifest (execution_id, manifest_id, kind, item_count, part_count)"
        " VALUES (5, 77, 'collection', 3, 0)"
    )


@pytest.mark.parametrize("mood", ["shut", "failing", "dropping", "silent"])
async def test_while_s3_is_away_an_archived_execution_can_be_asked_for_later(
    client: httpx.AsyncClient, gate: Gate, mood: Mood
) -> None:
    gate.spoil(mood)

    async with asyncio.timeout(60):
        answers = await asyncio.gather(*(client.get(path) for path in PATHS))

    for answer in answers:
        assert answer.status_code == 503, answer.text
        assert answer.headers["Retry-After"]
        assert f"S3 at {gate.url} could not read" in answer.json()["detail"]
        assert SECRET_KEY not in answer.text


async def test_what_is_asked_while_s3_is_there_is_answered_as_before(
    client: httpx.AsyncClient,
) -> None:
    results = (await client.get(f"{BASE}/steps/each/result")).json()

    assert results == [{"item": 0}, {"item": 1}, {"item": 2}]


async def test_what_was_read_once_is_read_again_without_s3(
    client: httpx.AsyncClient, gate: Gate
) -> None:
    first = await client.get(f"{BASE}/events")
    gate.spoil("shut")

    assert (await client.get(f"{BASE}/events")).content == first.content


async def test_a_file_that_is_gone_from_the_bucket_is_named(
    client: httpx.AsyncClient, s3_place: S3Place
) -> None:
    (name,) = [one for one in await s3_place.names() if "event-" in one]
    body = await s3_place.read(name)
    await s3_place.delete(name)

    answer = await client.get(f"{BASE}/events")
    await s3_place.write(name, body)

    assert answer.status_code == 404
    assert f"{s3_place.location}/{name}" in answer.json()["detail"]
    assert "backup" in answer.json()["detail"]


async def test_a_file_that_was_changed_in_the_bucket_is_not_shown(
    client: httpx.AsyncClient, s3_place: S3Place
) -> None:
    (name,) = [one for one in await s3_place.names() if "event-" in one]
    body = await s3_place.read(name)
    await s3_place.write(name, body[:-1] + b"?")

    answer = await client.get(f"{BASE}/events")
    await s3_place.write(name, body)

    assert answer.status_code == 503
    assert "is not what was archived" in answer.json()["detail"]


async def test_one_that_failed_and_is_archived_is_said_to_run_again_and_not_to_go_on(
    client: httpx.AsyncClient, pool: Pool
) -> None:
    await pool.execute("UPDATE noetl.execution SET status = 'FAILED'")

    said = " ".join((await client.get("/api/executions/5/explain")).json()["sentences"])

    await pool.execute("UPDATE noetl.execution SET status = 'COMPLETED'")
    assert "in an archive" in said
    assert "`noetl rerun 5`" in said
    assert "noetl retry" not in said
