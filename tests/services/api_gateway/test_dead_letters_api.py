"""What was set aside: listed, looked into, tried again, discarded."""

from base64 import b64decode
from typing import Any

import msgspec
import pytest

from noetl_core.domain.events import Given
from noetl_core.domain.ids import CatalogId, CommandId, ExecutionId, StepName, WorkerId
from noetl_core.domain.state import ExecutionState
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import (
    Done,
    Expired,
    Message,
    Parent,
    Reconcile,
    Retry,
    Start,
    Stored,
    encode_messages,
)
from services.api_gateway.conftest import Client
from services.api_gateway.given import an_execution
from services.api_gateway.test_executions_api import promised

STORED = Stored(tier="db", size=4, sha256=b"sha", inline=b'{"a":1}')
DONE = Done(
    execution_id=ExecutionId(1),
    command_id=CommandId("load.1#1"),
    worker_id=WorkerId("w1"),
    stored=STORED,
)
START = Start(
    execution_id=ExecutionId(1), catalog_id=CatalogId(7), path="p", version=1, payload=STORED
)


async def a_letter(
    pool: Pool, *messages: Message, source: str = "broker", body: bytes | None = None
) -> int:
    return int(
        await pool.fetchval(
            "INSERT INTO noetl.dead_letter (shard_id, execution_id, source, body, reason)"
            " VALUES (0, $1, $2, $3, 'bad luck') RETURNING dead_letter_id",
            1 if body is None else None,
            source,
            encode_messages(list(messages)) if body is None else body,
        )
    )


async def retry(client: Client, letter: int) -> tuple[int, dict[str, Any]]:
    answer = await client.post(f"/api/dead-letters/{letter}/retry")
    return answer.status_code, answer.json()


async def letters(pool: Pool) -> int:
    return int(await pool.fetchval("SELECT count(*) FROM noetl.dead_letter"))


async def a_failure(pool: Pool, **fields: Any) -> None:
    """An execution that has failed while its step `load` was under way."""
    await an_execution(pool, 1, status="FAILED")
    state = ExecutionState(execution_id=ExecutionId(1), status="FAILED", **fields)
    await pool.execute("UPDATE noetl.execution SET state = $1", msgspec.json.encode(state).decode())


class TestList:
    async def test_pages_go_from_the_newest_to_the_oldest(self, client: Client, pool: Pool) -> None:
        ids = [str(await a_letter(pool, DONE)) for _ in range(5)]
        seen: list[str] = []
        before: str | None = ""
        while before is not None:
            answer = await client.get(f"/api/dead-letters?limit=2{before and '&before=' + before}")
            page = answer.json()
            seen += [item["dead_letter_id"] for item in page["items"]]
            before = page["next_before"]

        assert seen == ids[::-1]

    async def test_it_can_be_of_one_execution_or_of_one_source(
        self, client: Client, pool: Pool
    ) -> None:
        await a_letter(pool, DONE)
        await a_letter(pool, DONE, source="reaper")
        await a_letter(pool, body=b"?")

        for filters, count in (("execution_id=1", 2), ("source=reaper", 1), ("source=x", 0)):
            page = (await client.get(f"/api/dead-letters?{filters}")).json()
            assert len(page["items"]) == count, filters


class TestLook:
    async def test_messages_are_shown_without_their_payloads(
        self, client: Client, pool: Pool
    ) -> None:
        letter = await a_letter(pool, DONE)

        document = (await client.get(f"/api/dead-letters/{letter}")).json()

        assert document["reason"] == "bad luck"
        (message,) = document["messages"]
        assert (message["type"], message["execution_id"]) == ("done", "1")
        assert "(7 bytes)" in message["stored"]

    async def test_ids_of_an_event_that_could_not_be_shown_are_strings(
        self, client: Client, pool: Pool
    ) -> None:
        large = 2**62 + 1
        body = {"event_id": large, "loop_id": None, "attempt": 1, "state": {"last_event_id": large}}
        letter = await a_letter(pool, source="projection", body=msgspec.json.encode(body))

        document = (await client.get(f"/api/dead-letters/{letter}")).json()

        assert document["messages"] == [
            {**body, "event_id": str(large), "state": {"last_event_id": str(large)}}
        ]

    async def test_what_nobody_can_read_says_so(self, client: Client, pool: Pool) -> None:
        letter = await a_letter(pool, body=b"\xff\xff")

        document = (await client.get(f"/api/dead-letters/{letter}")).json()

        assert document["messages"] is None
        assert "cannot read it" in document["unreadable"]

    @pytest.mark.parametrize("letter", ["0", "x", "9" * 19, "9" * 20, "-1"])
    async def test_one_that_is_not_there_is_not_found(self, client: Client, letter: str) -> None:
        for method, path in (("GET", ""), ("POST", "/retry"), ("DELETE", "")):
            answer = await client.request(method, f"/api/dead-letters/{letter}{path}")
            assert answer.status_code == 404


class TestRetry:
    async def test_it_goes_into_the_inbox_of_an_execution_that_has_not_ended(
        self, client: Client, pool: Pool
    ) -> None:
        await an_execution(pool, 1)
        letter = await a_letter(pool, DONE)

        status, body = await retry(client, letter)

        assert (status, body["execution_id"]) == (202, "1")
        assert await promised(pool) == [DONE]
        assert await letters(pool) == 0
        assert await pool.fetchval("SELECT action FROM noetl.audit") == "dead_letter.retried"

    @pytest.mark.parametrize(
        ("log", "status"),
        [
            (["execution.failed"], 409),
            (["execution.failed", "execution.retried"], 202),
            (["step.enter"], 202),
        ],
    )
    async def test_it_stays_while_the_status_does_not_show_that_the_execution_has_ended(
        self, client: Client, pool: Pool, log: list[str], status: int
    ) -> None:
        await an_execution(pool, 1)
        shown = await pool.fetchval("SELECT last_projected_event_id FROM noetl.execution")
        for number, event_type in enumerate(log, shown + 1):
            await pool.execute(
                "INSERT INTO noetl.event (execution_id, event_id, event_key, shard_id, event_type)"
                " VALUES (1, $1, $2, 0, $3)",
                number,
                str(number),
                event_type,
            )
        letter = await a_letter(pool, DONE)

        answered, body = await retry(client, letter)

        assert answered == status
        assert await letters(pool) == (1 if status == 409 else 0)
        if status == 409:
            assert "try again in a moment" in body["detail"]

    async def test_the_audit_keeps_what_was_sent_on(self, client: Client, pool: Pool) -> None:
        await an_execution(pool, 1)
        await retry(client, await a_letter(pool, DONE))

        details = msgspec.json.decode(await pool.fetchval("SELECT details FROM noetl.audit"))

        assert b64decode(details["body"]) == encode_messages([DONE])

    async def test_an_execution_that_was_ended_by_it_goes_on(
        self, client: Client, pool: Pool
    ) -> None:
        await a_failure(pool, interrupted={StepName("load"): [Given()]})
        letter = await a_letter(pool, DONE)

        status, body = await retry(client, letter)

        assert (status, body["did"]) == (202, "its execution goes on from where it ended")
        assert await promised(pool) == [Retry(execution_id=ExecutionId(1))]

    async def test_what_never_got_further_than_its_start_is_started_anew(
        self, client: Client, pool: Pool
    ) -> None:
        await a_failure(pool)
        letter = await a_letter(pool, START)

        status, body = await retry(client, letter)

        assert status == 202
        (start,) = await promised(pool)
        assert isinstance(start, Start)
        assert body["execution_id"] == str(start.execution_id) != "1"
        assert start.payload == STORED

    async def test_a_child_goes_on_by_its_parent(self, client: Client, pool: Pool) -> None:
        await a_failure(pool)
        parent = Parent(execution_id=ExecutionId(9), command_id=CommandId("call.1#1"))
        letter = await a_letter(pool, msgspec.structs.replace(START, parent=parent))

        status, problem = await retry(client, letter)

        assert status == 409
        assert "noetl retry 9" in problem["detail"]
        assert await letters(pool) == 1

    async def test_a_flagged_execution_is_looked_at_again(self, client: Client, pool: Pool) -> None:
        await an_execution(pool, 1)
        letter = await a_letter(pool, Reconcile(execution_id=ExecutionId(1)), source="reaper")

        assert (await retry(client, letter))[0] == 202
        assert await promised(pool) == [Reconcile(execution_id=ExecutionId(1))]

    async def test_what_would_lead_to_nothing_is_refused(self, client: Client, pool: Pool) -> None:
        await an_execution(pool, 1)
        lost = Expired(execution_id=ExecutionId(1), command_id=CommandId("load.1#5"), reason="gone")
        refused = [
            await a_letter(pool, lost, source="command"),
            await a_letter(pool, body=b"\xff"),
            await a_letter(pool, DONE, source="projection"),
        ]

        for letter in refused:
            assert (await retry(client, letter))[0] == 409
        await pool.execute("UPDATE noetl.execution SET status = 'COMPLETED'")
        assert (await retry(client, await a_letter(pool, DONE)))[0] == 409
        assert await letters(pool) == 4
        assert await promised(pool) == []


async def test_discarding_is_noted_in_the_audit(client: Client, pool: Pool) -> None:
    letter = await a_letter(pool, DONE)

    first = await client.delete(f"/api/dead-letters/{letter}")
    second = await client.delete(f"/api/dead-letters/{letter}")

    assert (first.status_code, second.status_code) == (200, 404)
    row = await pool.fetchrow("SELECT action, subject, details FROM noetl.audit")
    assert row is not None
    assert (row["action"], row["subject"]) == ("dead_letter.discarded", str(letter))
    assert msgspec.json.decode(row["details"])["reason"] == "bad luck"
