"""What steps returned, over HTTP."""

import json
from typing import Any

import msgspec
import pytest

from noetl_api_gateway.endpoint import Gateway
from noetl_core.domain.envelope import Envelope, Reference
from noetl_core.domain.errors import ToolError
from noetl_core.domain.ids import ExecutionId, RefId
from noetl_core.domain.result_view import STEP_DOCUMENT_MEDIA_TYPE
from noetl_core.domain.state import StepState
from noetl_core.store.postgres import Pool
from services.api_gateway.conftest import Client
from services.api_gateway.given import a_result, an_event, an_execution
from support.loop_log import NOTHING, LoopLog

MIB = 1024 * 1024


def done(
    ref_id: int, *, size: int = 0, kind: str = "db", execution_id: int | None = None
) -> StepState:
    fields = {"ref_id": ref_id, "type": kind, "bytes": size, "execution_id": execution_id}
    reference = msgspec.convert(fields, Reference)
    envelope = Envelope(status="ok", reference=reference)
    return StepState(visit=1, status="COMPLETED", result=envelope)


async def test_every_step_has_its_status_and_its_result(client: Client, pool: Pool) -> None:
    nothing = StepState(visit=2, status="COMPLETED", result=Envelope(status="ok"))
    failed = StepState(
        visit=1,
        status="FAILED",
        result=Envelope(status="error"),
        error=ToolError(kind="timeout", message="too long"),
    )
    steps = {"late": done(20), "early": done(10), "nothing": nothing, "failed": failed}
    await an_execution(pool, 1, steps={**steps, "running": StepState(visit=1)})
    await a_result(pool, 1, 10, b'{"n": 12345678901234567890}')
    await a_result(pool, 1, 20, b'[1, "x", null]')

    body = (await client.get("/api/executions/1/steps")).json()

    assert list(body)[:2] == ["early", "late"]
    assert body["early"]["result"] == {"n": 12345678901234567890}
    assert body["late"]["result"] == [1, "x", None]
    assert (body["nothing"]["result"], body["nothing"]["visit"]) == (None, 2)
    assert body["failed"]["error"] == {"kind": "timeout", "message": "too long"}
    assert (body["running"]["status"], body["running"]["result"]) == ("RUNNING", None)


async def test_the_document_of_a_pipeline_is_shown_as_its_value(client: Client, pool: Pool) -> None:
    document = b'{"data": {"a": 1}, "results": {"first": 2}, "meta": {"attempts": 3}}'
    await an_execution(pool, 1, steps={"s": done(10)})
    await a_result(pool, 1, 10, document, media_type=STEP_DOCUMENT_MEDIA_TYPE)

    body = (await client.get("/api/executions/1/steps")).json()
    whole = (await client.get("/api/executions/1/steps/s/result")).json()

    assert body["s"]["result"] == whole == {"a": 1}


async def loop_of(pool: Pool, bodies: dict[int, bytes | None], *, total: int) -> None:
    """Iterations end in any order; an index that is missing failed."""
    await an_execution(pool, 1, steps={"each": done(500, kind="eventlog")})
    await pool.execute(
        "INSERT INTO noetl.manifest (execution_id, manifest_id, kind, item_count, part_count) "
        "VALUES (1, 500, 'collection', $1, 1)",
        total,
    )
    for index, body in reversed(bodies.items()):
        event_id = await an_event(pool, 1, event_type="call.done", loop_id=500, iter_index=index)
        if body is not None:
            await a_result(pool, 1, event_id, body)


async def test_the_results_of_a_loop_are_a_list_in_order(client: Client, pool: Pool) -> None:
    await loop_of(pool, {0: b'"a"', 1: b'{"b": 1}', 3: None, 4: b"5"}, total=6)

    body = (await client.get("/api/executions/1/steps")).json()
    whole = (await client.get("/api/executions/1/steps/each/result")).json()

    assert body["each"]["result"] == ["a", {"b": 1}, None, None, 5, None]
    assert whole == body["each"]["result"]


async def test_a_loop_longer_than_a_page_is_sent_whole(client: Client, pool: Pool) -> None:
    await loop_of(pool, {}, total=1201)
    await pool.execute(
        "INSERT INTO noetl.event (execution_id, event_id, event_key, shard_id, event_type, "
        "loop_id, iter_index) SELECT 1, 100000 - n, 'k' || n, 0, 'call.done', 500, n "
        "FROM generate_series(0, 1200) AS n WHERE n % 100 <> 7"
    )
    await pool.execute(
        "INSERT INTO noetl.result_ref (execution_id, ref_id, step, store_tier, bytes, inline) "
        "SELECT 1, 100000 - n, 'each', 'db', 4, n::text::bytea FROM generate_series(0, 1200) AS n"
    )

    whole = (await client.get("/api/executions/1/steps/each/result")).json()

    assert whole == [None if n % 100 == 7 else n for n in range(1201)]


async def test_an_empty_loop_is_an_empty_list(client: Client, pool: Pool) -> None:
    await loop_of(pool, {}, total=0)

    assert (await client.get("/api/executions/1/steps/each/result")).json() == []


async def steps_and_whole(client: Client, step: str = "each") -> tuple[Any, Any]:
    steps = (await client.get("/api/executions/1/steps")).json()
    return steps[step]["result"], (
        await client.get(f"/api/executions/1/steps/{step}/result")
    ).json()


@pytest.mark.parametrize(
    ("collect", "expected"),
    [
        ("append", [1, 2, 3]),
        ("collect", [{"rows": [1]}, None, {"rows": [2, 3]}]),
        ("replace", {"rows": [2, 3]}),
    ],
)
async def test_pages_are_shown_as_what_they_collected(
    client: Client, pool: Pool, collect: str, expected: Any
) -> None:
    log = LoopLog(pool)
    sequence = await log.paged(None, {"rows": [1]}, NOTHING, {"rows": [2, 3]})
    await log.complete(None, sequence, pages=3, collect=collect, merge_path="rows")
    await an_execution(pool, 1, steps={"each": done(sequence, kind="pages")})

    assert await steps_and_whole(client) == (expected, expected)


async def test_a_step_that_called_a_child_shows_what_the_child_returned(
    client: Client, pool: Pool
) -> None:
    child = LoopLog(pool, 2)
    await child.started(2)
    await child.done(0, "a")
    whole = await child.done(None, {"n": 1})
    steps = {
        "plain": done(whole, size=7, execution_id=2),
        "each": done(child.loop_id, kind="eventlog", execution_id=2),
    }
    await an_execution(pool, 1, steps=steps)

    assert await steps_and_whole(client, "plain") == ({"n": 1}, {"n": 1})
    assert await steps_and_whole(client) == (["a", None], ["a", None])


async def test_items_of_a_loop_may_be_of_any_kind(client: Client, pool: Pool) -> None:
    log, child = LoopLog(pool), LoopLog(pool, 2)
    await child.started(1)
    await child.done(0, "inner")
    large = "x" * 100_000
    first = await log.started(6)
    await log.complete(0, await log.paged(0, [1], [2]), pages=2)
    await log.failed(1)
    await log.failed(2)
    await log.done(3, large)
    inner = Reference(ref_id=RefId(child.loop_id), type="eventlog", execution_id=ExecutionId(2))
    await log.done(4, reference=inner)
    await log.started(6, base=first)
    await log.done(2, "second try", is_shard=True)
    await an_execution(pool, 1, steps={"each": done(log.loop_id, kind="eventlog")})

    expected = [[1, 2], None, "second try", large, ["inner"], None]
    assert await steps_and_whole(client) == (expected, expected)


async def test_a_cursor_shows_its_frames(client: Client, pool: Pool) -> None:
    log = LoopLog(pool)
    await log.done(0, "a", frame_rows=2)
    await log.done(1, "the end of the work")
    await log.failed(2)
    await log.done(3, "b", frame_rows=1)
    await an_execution(pool, 1, steps={"each": done(log.loop_id, kind="eventlog")})

    assert await steps_and_whole(client) == (["a", None, "b"], ["a", None, "b"])


async def test_pages_and_loops_beyond_8_mib_are_only_referred_to(
    client: Client, pool: Pool
) -> None:
    log, child = LoopLog(pool), LoopLog(pool, 2)
    large = "x" * (5 * MIB)
    sequence = await log.paged(None, large, large)
    await log.complete(None, sequence, pages=2)
    await child.started(2)
    for index in (0, 1):
        await child.done(index, large)
    await log.started(1)
    inner = Reference(ref_id=RefId(child.loop_id), type="eventlog", execution_id=ExecutionId(2))
    await log.done(0, reference=inner)
    steps = {"pages": done(sequence, kind="pages"), "each": done(log.loop_id, kind="eventlog")}
    await an_execution(pool, 1, steps=steps)

    body = (await client.get("/api/executions/1/steps")).json()

    for step, value in (("pages", [large, large]), ("each", [[large, large]])):
        cut = body[step]["result"]
        assert (cut["_truncated"], cut["_bytes"]) == (True, 2 * (5 * MIB + 2))
        assert (await client.get(cut["_ref"])).json() == value


async def test_pages_that_are_gone_are_404(client: Client, pool: Pool) -> None:
    await an_execution(pool, 1, steps={"each": done(10, kind="pages")})

    assert (await client.get("/api/executions/1/steps/each/result")).status_code == 404
    body = (await client.get("/api/executions/1/steps")).json()
    assert body["each"]["result"]["_unavailable"] is True


async def test_beyond_8_mib_a_result_is_only_referred_to(client: Client, pool: Pool) -> None:
    large = json.dumps("x" * (5 * MIB)).encode()
    steps = {f"s/{n}": done(n, size=len(large)) for n in (10, 20)} | {"small": done(30, size=2)}
    await an_execution(pool, 1, steps=steps)
    for ref_id in (10, 20):
        await a_result(pool, 1, ref_id, large)
    await a_result(pool, 1, 30, b"42")

    body = (await client.get("/api/executions/1/steps")).json()

    assert len(body["s/10"]["result"]) == 5 * MIB
    assert body["small"]["result"] == 42
    cut = body["s/20"]["result"]
    assert (cut["_truncated"], cut["_bytes"]) == (True, len(large))
    assert (await client.get(cut["_ref"])).content == large


async def test_a_result_of_another_tier_is_found_there(
    client: Client, pool: Pool, gateway: Gateway
) -> None:
    large = {"x": "y" * 100_000}
    stored = await gateway.results.put(ExecutionId(1), "s.1#1", large)
    assert stored.uri is not None
    await an_execution(pool, 1, steps={"s": done(10, size=stored.size, kind="object_store")})
    body = msgspec.json.encode(large)
    await a_result(pool, 1, 10, body, uri=stored.uri)

    steps = (await client.get("/api/executions/1/steps")).json()
    whole = (await client.get("/api/executions/1/steps/s/result")).json()

    assert steps["s"]["result"] == whole == large


async def test_a_result_that_is_gone_says_so_and_hides_no_other(client: Client, pool: Pool) -> None:
    await an_execution(pool, 1, steps={"gone": done(10), "there": done(20)})
    await a_result(pool, 1, 20, b"1")

    body = (await client.get("/api/executions/1/steps")).json()
    whole = await client.get("/api/executions/1/steps/gone/result")

    assert body["gone"]["result"]["_unavailable"] is True
    assert body["there"]["result"] == 1
    assert whole.status_code == 404


async def test_a_step_without_a_result_is_404(client: Client, pool: Pool) -> None:
    await an_execution(pool, 1, steps={"running": StepState(visit=1)})

    for step in ("running", "nobody"):
        answer = await client.get(f"/api/executions/1/steps/{step}/result")
        assert answer.status_code == 404
        assert step in answer.json()["detail"]


def test_a_reference_names_an_event() -> None:
    """The helper above builds what the broker writes."""
    envelope = done(10, size=3).result

    assert envelope == Envelope(
        status="ok", reference=Reference(ref_id=RefId(10), type="db", bytes=3)
    )
