"""Starting, watching and cancelling executions over HTTP."""

import asyncio
import time
from typing import Any

import msgspec
import pytest

from noetl_api_gateway.endpoint import Gateway
from noetl_core.bus.connection import Bus
from noetl_core.domain.ids import ExecutionId, ShardId
from noetl_core.domain.sharding import SHARD_COUNT_DEFAULT, shard_of
from noetl_core.store import inbox
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Cancel, Message, Start, decode_messages
from noetl_core.wire.subjects import inbox_wake
from services.api_gateway.conftest import Client
from services.api_gateway.given import HELLO, an_event, an_execution, ends, registered

ALL_SHARDS = [ShardId(number) for number in range(SHARD_COUNT_DEFAULT)]


async def promised(pool: Pool) -> list[Message]:
    rows = await inbox.waiting(pool, ALL_SHARDS, limit=1000)
    return [message for row in rows for message in decode_messages(row.body)]


async def start(client: Client, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/api/execute", json={"path": "examples/hello", **fields})
    assert answer.status_code == 202, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def test_an_accepted_execution_is_in_the_inbox_of_its_shard(
    client: Client, pool: Pool
) -> None:
    entry = await registered(client)

    body = await start(client, payload={"name": "Ada"})

    execution_id = ExecutionId(int(body["execution_id"]))
    assert body["status"] == "PENDING"
    shard = shard_of(execution_id, shard_count=SHARD_COUNT_DEFAULT)
    assert len(await inbox.waiting(pool, [shard], limit=10)) == 1
    (message,) = await promised(pool)
    assert isinstance(message, Start)
    assert (message.execution_id, message.version) == (execution_id, 1)
    assert str(message.catalog_id) == entry["catalog_id"]
    assert message.payload is not None
    assert message.payload.inline == b'{"name":"Ada"}'


async def test_the_shard_is_woken_after_the_commit(client: Client, pool: Pool, bus: Bus) -> None:
    await registered(client)
    found: list[int] = []
    woken = asyncio.Event()

    async def look(_body: bytes) -> None:
        found.append(len(await promised(pool)))
        woken.set()

    for shard in ALL_SHARDS:
        await bus.subscribe(inbox_wake(shard), look)
    await start(client)

    await asyncio.wait_for(woken.wait(), 60)
    assert found == [1]


async def test_that_version_runs_which_was_asked_for(client: Client, pool: Pool) -> None:
    await registered(client)
    await registered(client, HELLO + "# changed\n")

    await start(client)
    await start(client, version=1)

    messages = await promised(pool)
    assert [m.version for m in messages if isinstance(m, Start)] == [2, 1]


async def test_an_unknown_playbook_is_404_and_promises_nothing(client: Client, pool: Pool) -> None:
    await registered(client)

    unknown = await client.post("/api/execute", json={"path": "nobody"})
    no_such_version = await client.post(
        "/api/execute", json={"path": "examples/hello", "version": 2}
    )

    assert (unknown.status_code, no_such_version.status_code) == (404, 404)
    assert await promised(pool) == []


async def test_a_payload_of_more_than_a_mebibyte_is_413(client: Client) -> None:
    await registered(client)

    fits = await client.post(
        "/api/execute", json={"path": "examples/hello", "payload": {"x": "a" * 1_000_000}}
    )
    large = await client.post(
        "/api/execute", json={"path": "examples/hello", "payload": {"x": "a" * 1_100_000}}
    )

    assert (fits.status_code, large.status_code) == (202, 413)
    assert "1048576" in large.json()["detail"]


async def test_a_payload_that_the_engine_could_not_carry_is_refused(client: Client) -> None:
    await registered(client)

    for payload in ('{"x": 36893488147419103232}', '{"x": "a\\u0000b"}'):
        answer = await client.post(
            "/api/execute",
            content=f'{{"path": "examples/hello", "payload": {payload}}}',
            headers={"Content-Type": "application/json"},
        )
        assert answer.status_code == 422


async def test_a_backslash_before_u0000_is_only_text(client: Client, pool: Pool) -> None:
    await registered(client)

    await start(client, payload={"x": "\\u0000"})

    (message,) = await promised(pool)
    assert isinstance(message, Start)
    assert message.payload is not None
    assert msgspec.json.decode(message.payload.inline or b"") == {"x": "\\u0000"}


class TestIdempotency:
    async def test_a_repeated_request_gives_the_same_execution(
        self, client: Client, pool: Pool
    ) -> None:
        await registered(client)

        first = await start(client, idempotency_key="once")
        again = await start(client, idempotency_key="once")

        assert again == {**first, "repeated": True}
        assert len(await promised(pool)) == 1

    async def test_the_header_means_the_same_as_the_field(self, client: Client) -> None:
        await registered(client)
        body = {"path": "examples/hello"}

        first = await client.post("/api/execute", json=body, headers={"Idempotency-Key": "once"})
        again = await start(client, idempotency_key="once")

        assert again["execution_id"] == first.json()["execution_id"]

    async def test_duplicates_at_once_start_one_execution(self, client: Client, pool: Pool) -> None:
        await registered(client)

        bodies = await asyncio.gather(*(start(client, idempotency_key="once") for _ in range(12)))

        assert len({body["execution_id"] for body in bodies}) == 1
        assert sum(not body["repeated"] for body in bodies) == 1
        assert len(await promised(pool)) == 1

    async def test_a_retry_gives_the_same_execution_though_a_version_was_added(
        self, client: Client
    ) -> None:
        await registered(client)
        first = await start(client, idempotency_key="once")
        await registered(client, HELLO + "# changed\n")

        again = await start(client, idempotency_key="once")

        assert (again["execution_id"], again["version"]) == (first["execution_id"], 1)

    async def test_a_retry_after_the_end_says_how_it_ended(
        self, client: Client, pool: Pool
    ) -> None:
        await registered(client)
        first = await start(client, idempotency_key="once")
        await an_execution(pool, int(first["execution_id"]), status="COMPLETED")

        again = await start(client, idempotency_key="once")

        assert again["status"] == "COMPLETED"

    async def test_a_key_of_another_request_is_refused(self, client: Client, pool: Pool) -> None:
        await registered(client)
        await start(client, idempotency_key="once", payload={"a": 1})

        other = await client.post(
            "/api/execute",
            json={"path": "examples/hello", "payload": {"a": 2}, "idempotency_key": "once"},
        )

        assert other.status_code == 422
        assert len(await promised(pool)) == 1

    async def test_a_crash_before_the_commit_leaves_neither_key_nor_promise(
        self, client: Client, pool: Pool
    ) -> None:
        await registered(client)
        await pool.execute("ALTER TABLE noetl.inbox RENAME TO inbox_away")
        crashed = await client.post(
            "/api/execute", json={"path": "examples/hello", "idempotency_key": "once"}
        )
        await pool.execute("ALTER TABLE noetl.inbox_away RENAME TO inbox")
        assert crashed.status_code == 500

        retried = await start(client, idempotency_key="once")

        assert not retried["repeated"]
        assert len(await promised(pool)) == 1

    @pytest.mark.parametrize("key", ["", "k" * 256])
    async def test_a_key_has_1_to_255_characters(self, client: Client, key: str) -> None:
        await registered(client)

        answer = await client.post(
            "/api/execute", json={"path": "examples/hello"}, headers={"Idempotency-Key": key}
        )

        assert answer.status_code == 422


class TestStatus:
    async def test_the_row_of_the_projection_comes_back_with_ids_as_strings(
        self, client: Client, pool: Pool
    ) -> None:
        progress = {"greet": {"status": "RUNNING", "visits": 1, "total": 9, "done": 4, "failed": 1}}
        await an_execution(pool, 2**62, progress=progress, error={"kind": "x", "message": "y"})

        body = (await client.get(f"/api/executions/{2**62}")).json()

        assert body["execution_id"] == str(2**62)
        assert body["last_event_id"] == "99"
        assert body["progress"] == progress
        assert body["error"] == {"kind": "x", "message": "y"}
        assert body["waiting_on"] == "a worker"
        assert body["started_at"] == "2026-01-01T00:00:00Z"

    async def test_a_request_that_no_broker_has_seen_is_pending(self, client: Client) -> None:
        await registered(client)
        accepted = await start(client)

        answer = await client.get(f"/api/executions/{accepted['execution_id']}")

        assert answer.status_code == 200
        body = answer.json()
        assert (body["status"], body["path"], body["version"]) == ("PENDING", "examples/hello", 1)
        assert body["catalog_id"] == accepted["catalog_id"]

    async def test_a_started_execution_that_no_projection_has_seen_is_running(
        self, client: Client, pool: Pool
    ) -> None:
        entry = await registered(client)
        accepted = await start(client)
        execution_id = int(accepted["execution_id"])
        await pool.execute("DELETE FROM noetl.inbox")
        await an_event(pool, execution_id, event_key="start", catalog_id=int(entry["catalog_id"]))

        body = (await client.get(f"/api/executions/{execution_id}")).json()

        assert (body["status"], body["path"], body["version"]) == ("RUNNING", "examples/hello", 1)

    async def test_a_request_that_was_parked_has_failed_and_says_why(
        self, client: Client, pool: Pool
    ) -> None:
        await registered(client)
        accepted = await start(client)
        await pool.execute(
            "WITH gone AS (DELETE FROM noetl.inbox RETURNING execution_id, body) "
            "INSERT INTO noetl.dead_letter (execution_id, body, source, reason) "
            "SELECT execution_id, body, 'inbox', 'it was odd' FROM gone"
        )

        body = (await client.get(f"/api/executions/{accepted['execution_id']}")).json()

        assert body["status"] == "FAILED"
        assert "it was odd" in body["error"]["message"]
        assert body["path"] == "examples/hello"

    @pytest.mark.parametrize("text", ["1", "0", "x", "-1", str(2**63), "9" * 40, "1.5", "%00", "٣"])
    async def test_an_unknown_id_is_404(self, client: Client, text: str) -> None:
        for suffix in ("", "/events", "/steps", "/steps/greet/result"):
            answer = await client.get(f"/api/executions/{text}{suffix}")
            assert answer.status_code == 404, suffix
        assert (await client.post(f"/api/executions/{text}/cancel")).status_code == 404


class TestWaiting:
    async def test_the_answer_comes_when_the_execution_ends(
        self, client: Client, pool: Pool
    ) -> None:
        await an_execution(pool, 1)
        waiting = asyncio.create_task(client.get("/api/executions/1?wait=30"))
        await asyncio.sleep(0.1)
        assert not waiting.done()

        await ends(pool, 1)

        body = (await asyncio.wait_for(waiting, 20)).json()
        assert body["status"] == "COMPLETED"

    async def test_the_answer_comes_when_the_time_is_up(self, client: Client, pool: Pool) -> None:
        await an_execution(pool, 1)
        begun = time.monotonic()

        body = (await client.get("/api/executions/1?wait=0.2")).json()

        assert body["status"] == "RUNNING"
        assert 0.2 <= time.monotonic() - begun < 20

    async def test_an_execution_that_has_ended_is_not_waited_for(
        self, client: Client, pool: Pool
    ) -> None:
        await an_execution(pool, 1, status="FAILED")

        await asyncio.wait_for(client.get("/api/executions/1?wait=60"), 30)

    async def test_each_of_many_waiters_hears_of_its_own_execution(
        self, client: Client, pool: Pool
    ) -> None:
        for execution_id in range(1, 6):
            await an_execution(pool, execution_id)
        waiting = [
            asyncio.create_task(client.get(f"/api/executions/{execution_id}?wait=30"))
            for execution_id in (1, 2, 3, 4, 5, 5)
        ]
        await asyncio.sleep(0.1)

        await ends(pool, 5)

        await asyncio.wait_for(asyncio.gather(*waiting[4:]), 20)
        assert not any(task.done() for task in waiting[:4])
        await pool.execute("UPDATE noetl.execution SET status = 'CANCELLED'")
        await asyncio.wait_for(asyncio.gather(*waiting), 20)

    async def test_a_stopping_gateway_sends_waiters_home(
        self, client: Client, pool: Pool, gateway: Gateway
    ) -> None:
        await an_execution(pool, 1)
        waiting = asyncio.create_task(client.get("/api/executions/1?wait=30"))
        await asyncio.sleep(0.1)

        gateway.ends.release()

        assert (await asyncio.wait_for(waiting, 20)).json()["status"] == "RUNNING"

    @pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "61", "x"])
    async def test_a_wait_is_0_to_60_seconds(
        self, client: Client, pool: Pool, seconds: str
    ) -> None:
        await an_execution(pool, 1)

        answer = await client.get(f"/api/executions/1?wait={seconds}")

        assert answer.status_code == 422
        assert answer.json()["field"] == "wait"


class TestList:
    async def test_pages_go_from_the_newest_to_the_oldest_and_miss_none(
        self, client: Client, pool: Pool
    ) -> None:
        for number in range(1, 8):
            await an_execution(pool, number, seconds=number // 2)  # some start at the same moment
        seen: list[str] = []
        cursor: str | None = ""
        while cursor is not None:
            page = (await client.get(f"/api/executions?limit=2{cursor}")).json()
            seen += [item["execution_id"] for item in page["items"]]
            cursor = page["next_cursor"] and f"&cursor={page['next_cursor']}"

        assert seen == ["7", "6", "5", "4", "3", "2", "1"]

    async def test_filters_hold_together(self, client: Client, pool: Pool) -> None:
        await an_execution(pool, 1, status="FAILED", path="a")
        await an_execution(pool, 2, status="FAILED", path="b")
        await an_execution(pool, 3, status="RUNNING", path="a")

        async def found(query: str) -> list[str]:
            page = (await client.get(f"/api/executions?{query}")).json()
            return sorted(item["execution_id"] for item in page["items"])

        assert await found("") == ["1", "2", "3"]
        assert await found("status=FAILED") == ["1", "2"]
        assert await found("path=a") == ["1", "3"]
        assert await found("status=FAILED&path=a") == ["1"]
        assert await found("path=%25") == []

    @pytest.mark.parametrize(
        ("query", "field"),
        [
            ("status=DONE", "status"),
            ("limit=0", "limit"),
            ("limit=1001", "limit"),
            ("limit=x", "limit"),
            ("cursor=x", "cursor"),
            ("cursor=1-9999999999999999999", "cursor"),
            ("color=red", "color"),
            ("limit=1&limit=2", "limit"),
            ("path=%00", "path"),
        ],
    )
    async def test_a_wrong_query_names_its_parameter(
        self, client: Client, query: str, field: str
    ) -> None:
        answer = await client.get(f"/api/executions?{query}")

        assert answer.status_code == 422
        assert answer.json()["field"] == field


class TestEvents:
    async def test_the_log_is_read_in_its_order_in_pages(self, client: Client, pool: Pool) -> None:
        ids = [str(await an_event(pool, 1)) for _ in range(5)]
        await an_event(pool, 2)

        first = (await client.get("/api/executions/1/events?limit=3")).json()
        rest = (await client.get(f"/api/executions/1/events?after={first['next_after']}")).json()

        assert [event["event_id"] for event in first["items"] + rest["items"]] == ids
        assert rest["next_after"] is None

    async def test_ids_inside_an_envelope_are_strings_too(self, client: Client, pool: Pool) -> None:
        envelope = {
            "status": "ok",
            "reference": {"ref_id": 2**62 + 1, "type": "db", "bytes": 3},
            "parent_ref": {"ref_id": None},
            "context": {"total": 3},
        }
        await an_event(pool, 1, event_type="call.done", result=envelope, loop_id=2**62)

        (event,) = (await client.get("/api/executions/1/events")).json()["items"]

        assert event["loop_id"] == str(2**62)
        assert event["result"]["reference"]["ref_id"] == str(2**62 + 1)
        assert event["result"]["parent_ref"] == {"ref_id": None}
        assert event["result"]["context"] == {"total": 3}

    async def test_ids_inside_a_context_are_strings_too(self, client: Client, pool: Pool) -> None:
        large = 2**62 + 1
        chunk = {"step": "read", "result": {"status": "ok", "reference": {"ref_id": large}}}
        token = {"parent_ref": large, "input": {"n": large}, "chunk": chunk}
        contexts = {
            "checkpoint.committed": {"barrier": large},
            "step.enter": {"visit": 1, **token},
            "execution.retried": {"entries": ["read"], "given": [token]},
        }
        for event_type, context in contexts.items():
            event_id = await an_event(pool, 1, event_type=event_type)
            await pool.execute(
                "UPDATE noetl.event SET context = $2 WHERE event_id = $1",
                event_id,
                msgspec.json.encode(context).decode(),
            )

        page = (await client.get("/api/executions/1/events")).json()

        closed, entered, retried = (event["context"] for event in page["items"])
        assert closed == {"barrier": str(large)}
        for brought in (entered, *retried["given"]):
            assert brought["parent_ref"] == str(large)
            assert brought["chunk"]["result"]["reference"]["ref_id"] == str(large)
            assert brought["input"] == {"n": large}, "what a user has put in is no id"

    async def test_an_accepted_execution_has_an_empty_log(self, client: Client) -> None:
        await registered(client)
        accepted = await start(client)

        answer = await client.get(f"/api/executions/{accepted['execution_id']}/events")

        assert answer.json() == {"items": [], "next_after": None}


class TestCancel:
    async def test_the_wish_is_promised_with_its_reason(self, client: Client, pool: Pool) -> None:
        await an_execution(pool, 4711)

        answer = await client.post("/api/executions/4711/cancel", json={"reason": "too slow"})

        assert answer.status_code == 202
        assert answer.json() == {"execution_id": "4711", "accepted": True}
        assert await promised(pool) == [Cancel(execution_id=ExecutionId(4711), reason="too slow")]

    async def test_no_body_means_no_reason(self, client: Client, pool: Pool) -> None:
        await an_execution(pool, 4711)

        assert (await client.post("/api/executions/4711/cancel")).status_code == 202

    async def test_an_execution_that_was_only_just_accepted_can_be_cancelled(
        self, client: Client, pool: Pool
    ) -> None:
        await registered(client)
        accepted = await start(client)

        answer = await client.post(f"/api/executions/{accepted['execution_id']}/cancel")

        assert answer.status_code == 202
        assert [type(message) for message in await promised(pool)] == [Start, Cancel]
        status = (await client.get(f"/api/executions/{accepted['execution_id']}")).json()
        assert status["status"] == "PENDING"

    @pytest.mark.parametrize("status", ["COMPLETED", "FAILED", "CANCELLED"])
    async def test_what_has_ended_cannot_be_cancelled(
        self, client: Client, pool: Pool, status: str
    ) -> None:
        await an_execution(pool, 4711, status=status)

        answer = await client.post("/api/executions/4711/cancel")

        assert answer.status_code == 409
        assert status in answer.json()["detail"]
        assert await promised(pool) == []
