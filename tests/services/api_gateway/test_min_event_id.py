"""Read your writes: an answer is not older than an event that the client names."""

import asyncio
import time

from noetl_api_gateway.shown import SECONDS_DEFAULT
from noetl_core.domain.ids import ExecutionId
from noetl_core.domain.sharding import SHARD_COUNT_DEFAULT, shard_of
from noetl_core.domain.state import StepState
from noetl_core.store.postgres import Pool
from services.api_gateway.conftest import Client
from services.api_gateway.given import an_event, an_execution

QUICK_SECONDS = SECONDS_DEFAULT - 0.5
"""Nobody has waited, who would have waited longer."""
SHOWN = 99  # what `an_execution` says it was projected up to


async def shows(pool: Pool, event_id: int, *, status: str = "COMPLETED") -> None:
    await pool.execute(
        "UPDATE noetl.execution SET last_projected_event_id = $1, status = $2", event_id, status
    )


async def passes(pool: Pool, shard: int, event_id: int) -> None:
    await pool.execute(
        "INSERT INTO noetl.projection_checkpoint (shard_id, last_projected_event_id) "
        "VALUES ($1, $2)",
        shard,
        event_id,
    )


async def test_an_event_that_is_shown_already_costs_no_wait(client: Client, pool: Pool) -> None:
    await an_execution(pool, 1)

    begun = time.monotonic()
    answer = await client.get(f"/api/executions/1?min_event_id={SHOWN}")

    assert answer.status_code == 200
    assert time.monotonic() - begun < QUICK_SECONDS


async def test_the_answer_waits_until_the_event_is_shown(client: Client, pool: Pool) -> None:
    await an_execution(pool, 1)
    known = await an_event(pool, 1)

    asked = asyncio.create_task(client.get(f"/api/executions/1?min_event_id={known}"))
    await asyncio.sleep(0.3)
    assert not asked.done()
    await shows(pool, known)

    answer = await asyncio.wait_for(asked, 30)
    assert answer.status_code == 200
    assert answer.json()["last_event_id"] == str(known)
    assert answer.json()["status"] == "COMPLETED"


async def test_an_event_that_is_not_shown_in_time_is_a_504_that_says_what_to_do(
    client: Client, pool: Pool
) -> None:
    await an_execution(pool, 1)
    known = await an_event(pool, 1)

    for suffix in ("", "/steps", "/steps/greet/result"):
        answer = await client.get(f"/api/executions/1{suffix}?min_event_id={known}&wait=0.1")

        assert answer.status_code == 504, answer.text
        problem = answer.json()
        assert problem["type"] == "urn:noetl:problem:not-shown-yet"
        assert f"does not show event {known} after 0.1 s" in problem["detail"]
        assert "`wait`" in problem["detail"]
        assert answer.headers["retry-after"] == "1"


async def test_a_wait_of_zero_looks_once(client: Client, pool: Pool) -> None:
    await an_execution(pool, 1)
    known = await an_event(pool, 1)

    begun = time.monotonic()
    answer = await client.get(f"/api/executions/1?min_event_id={known}&wait=0")

    assert answer.status_code == 504
    assert time.monotonic() - begun < QUICK_SECONDS


async def test_an_event_of_another_execution_counts_when_the_shard_has_passed_it(
    client: Client, pool: Pool
) -> None:
    await an_execution(pool, 1)
    shard = shard_of(ExecutionId(1), shard_count=SHARD_COUNT_DEFAULT)
    await passes(pool, shard, 5000)

    answer = await client.get("/api/executions/1?min_event_id=4000")

    assert answer.status_code == 200


async def test_an_event_counts_on_the_shard_that_it_was_written_under(
    client: Client, pool: Pool
) -> None:
    await an_execution(pool, 1)
    known = await an_event(pool, 1)  # on shard 0
    shard = shard_of(ExecutionId(1), shard_count=SHARD_COUNT_DEFAULT)
    assert shard != 0
    await passes(pool, shard, known)

    before = await client.get(f"/api/executions/1?min_event_id={known}&wait=0")
    await passes(pool, 0, known)
    after = await client.get(f"/api/executions/1?min_event_id={known}&wait=0")

    assert (before.status_code, after.status_code) == (504, 200)


async def test_steps_are_read_as_of_the_event(client: Client, pool: Pool) -> None:
    await an_execution(pool, 1, steps={"greet": StepState(visit=1, status="RUNNING")})
    known = await an_event(pool, 1)

    asked = asyncio.create_task(client.get(f"/api/executions/1/steps?min_event_id={known}"))
    await asyncio.sleep(0.2)
    assert not asked.done()
    await shows(pool, known)

    assert (await asyncio.wait_for(asked, 30)).json()["greet"]["status"] == "RUNNING"


async def test_an_unknown_execution_is_not_waited_for(client: Client) -> None:
    for suffix in ("", "/steps"):
        begun = time.monotonic()
        answer = await client.get(f"/api/executions/12{suffix}?min_event_id=5")

        assert answer.status_code == 404
        assert time.monotonic() - begun < QUICK_SECONDS


async def test_an_event_names_its_epoch_in_its_meta(client: Client, pool: Pool) -> None:
    await an_execution(pool, 1)
    await an_event(pool, 1)
    later = await an_event(pool, 1)
    await pool.execute(
        'UPDATE noetl.event SET epoch_id = 7, meta = \'{"worker_id": "w"}\' WHERE event_id = $1',
        later,
    )

    first, second = (await client.get("/api/executions/1/events")).json()["items"]

    assert first["meta"] is None
    assert second["meta"] == {"worker_id": "w", "epoch_id": "7"}
    assert second["epoch_id"] == "7"
