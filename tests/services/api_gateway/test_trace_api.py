"""GET /api/executions/{id}/trace/{step}: the chain of results behind a result."""

from datetime import UTC, datetime

import httpx

from noetl_core.domain.envelope import Envelope, ParentReference, Reference
from noetl_core.domain.ids import ExecutionId, RefId
from noetl_core.domain.state import StepState
from noetl_core.store.postgres import Pool

from .given import a_result, an_event, an_execution


def an_envelope(ref_id: int | None, parent: int | None, *, kind: str = "db") -> Envelope:
    reference = None
    if ref_id is not None:
        reference = Reference(ref_id=RefId(ref_id), type=kind)  # type: ignore[arg-type]
    parent_ref = ParentReference(ref_id=None if parent is None else RefId(parent))
    return Envelope(status="ok", reference=reference, parent_ref=parent_ref)


async def a_call(pool: Pool, execution_id: int, parent: int | None) -> int:
    """An event `call.done` with a result, as the broker records it."""
    event_id = await an_event(pool, execution_id, event_type="call.done", result={"status": "ok"})
    await pool.execute(
        "UPDATE noetl.event SET result = jsonb_build_object("
        " 'status', 'ok', 'context', '{}'::jsonb,"
        " 'reference', jsonb_build_object('ref_id', event_id, 'type', 'db'),"
        " 'parent_ref', jsonb_build_object('ref_id', $2::bigint)), node_name = 's' || event_id"
        " WHERE event_id = $1",
        event_id,
        parent,
    )
    await a_result(pool, execution_id, event_id, b'{"a": 1}')
    return event_id


async def test_the_chain_goes_back_to_the_first_result(
    client: httpx.AsyncClient, pool: Pool
) -> None:
    first = await a_call(pool, 5, None)
    second = await a_call(pool, 5, first)
    third = await a_call(pool, 5, second)
    result = an_envelope(third, second)
    await an_execution(
        pool, 5, steps={"load": StepState(status="COMPLETED", visit=1, result=result)}
    )

    answer = await client.get("/api/executions/5/trace/load")

    body = answer.json()
    assert answer.status_code == 200, answer.text
    assert body["is_complete"]
    assert [link["ref_id"] for link in body["links"]] == [str(third), str(second), str(first)]
    assert body["links"][0]["step"] == "load"
    assert body["links"][1] == {
        **body["links"][1],
        "execution_id": "5",
        "step": f"s{second}",
        "event_type": "call.done",
        "tier": "db",
        "bytes": 8,
        "media_type": "application/json",
        "parent_ref_id": str(first),
    }


async def test_a_chain_that_leads_nowhere_is_not_complete(
    client: httpx.AsyncClient, pool: Pool
) -> None:
    result = an_envelope(None, 12)
    await an_execution(
        pool, 5, steps={"load": StepState(status="COMPLETED", visit=1, result=result)}
    )

    body = (await client.get("/api/executions/5/trace/load")).json()

    assert not body["is_complete"]
    assert len(body["links"]) == 1


async def test_an_expired_result_is_traced_but_not_read(
    client: httpx.AsyncClient, pool: Pool
) -> None:
    ref_id = await a_call(pool, 5, None)
    past = datetime(2026, 1, 1, tzinfo=UTC)
    await pool.execute("UPDATE noetl.result_ref SET expires_at = $1", past)
    result = an_envelope(ref_id, None)
    await an_execution(
        pool, 5, steps={"load": StepState(status="COMPLETED", visit=1, result=result)}
    )

    traced = (await client.get("/api/executions/5/trace/load")).json()
    read = await client.get("/api/executions/5/steps/load/result")
    steps = (await client.get("/api/executions/5/steps")).json()

    assert traced["links"][0]["expires_at"] == "2026-01-01T00:00:00Z"
    assert read.status_code == 404
    assert "expired at 2026-01-01" in read.json()["detail"]
    assert "expired at" in steps["load"]["result"]["_reason"]


async def test_what_the_database_has_removed_is_gone_for_a_reader_whose_clock_is_behind(
    client: httpx.AsyncClient, pool: Pool
) -> None:
    ref_id = await a_call(pool, 5, None)
    await pool.execute(
        "UPDATE noetl.result_ref SET inline = '', removed_at = now(), expires_at = $1",
        datetime(2099, 1, 1, tzinfo=UTC),
    )
    result = an_envelope(ref_id, None)
    await an_execution(
        pool, 5, steps={"load": StepState(status="COMPLETED", visit=1, result=result)}
    )

    read = await client.get("/api/executions/5/steps/load/result")
    steps = (await client.get("/api/executions/5/steps")).json()

    assert (read.status_code, steps["load"]["result"]["_unavailable"]) == (404, True)


async def test_an_unknown_step_or_execution_is_said(client: httpx.AsyncClient, pool: Pool) -> None:
    await an_execution(pool, 5)

    no_step = await client.get("/api/executions/5/trace/load")
    nobody = await client.get("/api/executions/6/trace/load")

    assert no_step.status_code == 404
    assert "has not entered a step 'load'" in no_step.json()["detail"]
    assert nobody.status_code == 404


async def test_an_archive_that_is_not_here_is_named(client: httpx.AsyncClient, pool: Pool) -> None:
    await an_execution(pool, 5, status="COMPLETED")
    await pool.execute(
        "INSERT INTO noetl.manifest (execution_id, manifest_id, kind, item_count, part_count, meta)"
        ' VALUES (0, 1, \'archive\', 1, 1, \'{"kept": [], "dropped_at": "2026-01-01"}\')'
    )
    await pool.execute(
        "INSERT INTO noetl.manifest_part (execution_id, manifest_id, part_index, item_count,"
        " store_tier, physical_uri, bytes, sha256, source, lower_id, upper_id)"
        " VALUES (0, 1, 0, 1, 'pvc', 'archive:2024w01-1/event-0000.parquet', 1, '', 'event', 1, 9)"
    )

    answer = await client.get(f"/api/executions/{ExecutionId(5)}/events")

    assert answer.status_code == 404
    assert "NOETL_ARCHIVE_DIR" in answer.json()["detail"]
