"""Signal, pause, resume, retry, rerun, fork, children: what the broker is told, and refusals."""

import hashlib
from typing import Any

import msgspec
import pytest

from noetl_core.domain.envelope import Envelope, Reference
from noetl_core.domain.errors import ToolError
from noetl_core.domain.events import (
    AnyFact,
    CallDone,
    CommandClaimed,
    CommandIssued,
    Event,
    ExecutionFailed,
    ExecutionStarted,
    Given,
    Hop,
    StepEntered,
    StepExited,
)
from noetl_core.domain.ids import (
    CatalogId,
    CommandId,
    EventId,
    ExecutionId,
    RefId,
    ShardId,
    StepName,
    WorkerId,
)
from noetl_core.domain.state import ExecutionState, OpenCommand, Parked, StepState
from noetl_core.store.event import event_row
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Fork, Pause, Resume, Retry, Signal, Start
from services.api_gateway.conftest import Client
from services.api_gateway.given import a_result, an_execution
from services.api_gateway.test_executions_api import promised

LOAD, SAVE = StepName("load"), StepName("save")
WORKER = WorkerId("w1")


async def post(client: Client, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    answer = await client.post(f"/api/executions/{path}", json=body)
    return answer.status_code, answer.json()


async def a_state(pool: Pool, state: ExecutionState) -> None:
    """What the projection would say of the execution that is there already."""
    await pool.execute(
        "UPDATE noetl.execution SET state = $2 WHERE execution_id = $1",
        state.execution_id,
        msgspec.json.encode(state).decode(),
    )


class TestSignal:
    async def test_what_was_said_is_in_the_inbox(self, client: Client, pool: Pool) -> None:
        await an_execution(pool, 1)

        status, body = await post(client, "1/signal", name="go", data={"n": 1}, by="ada")

        assert (status, body) == (202, {"execution_id": "1", "accepted": True})
        (message,) = await promised(pool)
        assert isinstance(message, Signal)
        assert (message.execution_id, message.name, message.by) == (1, "go", "ada")
        assert message.approved
        assert message.data is not None
        assert message.data.inline == b'{"n":1}'
        assert message.signal_id > 0

    async def test_two_signals_differ_and_a_repeated_request_is_one(
        self, client: Client, pool: Pool
    ) -> None:
        await an_execution(pool, 1)
        for _ in range(2):
            await post(client, "1/signal", name="go", approved=False)
        for _ in range(2):
            answer = await client.post(
                "/api/executions/1/signal", json={"name": "go"}, headers={"Idempotency-Key": "k"}
            )
            assert answer.status_code == 202

        signals = [m for m in await promised(pool) if isinstance(m, Signal)]
        assert [signal.approved for signal in signals] == [False, False, True]
        assert len({signal.signal_id for signal in signals}) == 3

    @pytest.mark.parametrize("status", ["COMPLETED", "FAILED", "CANCELLED"])
    async def test_an_execution_that_has_ended_hears_nothing(
        self, client: Client, pool: Pool, status: str
    ) -> None:
        await an_execution(pool, 1, status=status)

        code, body = await post(client, "1/signal", name="go")

        assert code == 409
        assert status in body["detail"]
        assert await promised(pool) == []

    async def test_whoever_may_not_approve_is_told_who_may(
        self, client: Client, pool: Pool
    ) -> None:
        await an_execution(pool, 1)
        wait = Parked(kind="approval", signal="release", approvers=("ada", "bob"))
        held = OpenCommand(step=SAVE, visit=1, worker_id=WORKER, parked=wait)
        state = ExecutionState(
            execution_id=ExecutionId(1), status="RUNNING", commands={CommandId("save.1#1"): held}
        )
        await a_state(pool, state)

        code, body = await post(client, "1/signal", name="release", by="eve")
        allowed, _ = await post(client, "1/signal", name="release", by="bob")

        assert (code, body["field"]) == (422, "by")
        assert "ada or bob" in body["detail"]
        assert allowed == 202


class TestPauseAndResume:
    async def test_each_wish_is_in_the_inbox(self, client: Client, pool: Pool) -> None:
        await an_execution(pool, 1)
        await an_execution(pool, 2, status="PAUSED")

        paused, _ = await post(client, "1/pause", reason="look first")
        resumed = await client.post("/api/executions/2/resume")

        assert (paused, resumed.status_code) == (202, 202)
        assert sorted(await promised(pool), key=lambda m: m.execution_id) == [  # type: ignore[union-attr]
            Pause(execution_id=ExecutionId(1), reason="look first"),
            Resume(execution_id=ExecutionId(2)),
        ]

    @pytest.mark.parametrize(
        ("status", "wish"),
        [
            ("PAUSED", "pause"),
            ("COMPLETED", "pause"),
            ("RUNNING", "resume"),
            ("FAILED", "resume"),
        ],
    )
    async def test_what_makes_no_sense_now_is_refused_with_a_sentence(
        self, client: Client, pool: Pool, status: str, wish: str
    ) -> None:
        await an_execution(pool, 1, status=status)

        code, body = await post(client, f"1/{wish}")

        assert code == 409
        assert status.lower() in body["detail"].lower()
        assert await promised(pool) == []


class TestRetry:
    async def test_a_failed_execution_goes_on_where_it_ended(
        self, client: Client, pool: Pool
    ) -> None:
        await an_execution(pool, 1, status="FAILED")
        interrupted = {LOAD: [Given()]}
        await a_state(pool, ExecutionState(execution_id=ExecutionId(1), interrupted=interrupted))

        status = (await client.post("/api/executions/1/retry")).status_code

        assert status == 202
        assert await promised(pool) == [Retry(execution_id=ExecutionId(1))]

    async def test_a_step_and_all_its_items_can_be_asked_for(
        self, client: Client, pool: Pool
    ) -> None:
        await an_execution(pool, 1, status="COMPLETED", steps={"load": StepState(visit=1)})

        status, _ = await post(client, "1/retry", step="load", items="all")

        assert status == 202
        assert await promised(pool) == [Retry(execution_id=ExecutionId(1), step=LOAD, items="all")]

    @pytest.mark.parametrize("status", ["RUNNING", "PAUSED", "PENDING"])
    async def test_what_has_not_ended_is_not_retried(
        self, client: Client, pool: Pool, status: str
    ) -> None:
        await an_execution(pool, 1, status=status)

        code, body = await post(client, "1/retry")

        assert code == 409
        assert status in body["detail"]

    async def test_what_has_completed_needs_a_step(self, client: Client, pool: Pool) -> None:
        await an_execution(pool, 1, status="COMPLETED", steps={"load": StepState(visit=1)})

        code, body = await post(client, "1/retry")

        assert (code, body["field"]) == (422, "step")

    async def test_an_unknown_step_is_refused_with_those_there_are(
        self, client: Client, pool: Pool
    ) -> None:
        await an_execution(pool, 1, status="FAILED", steps={"load": StepState(), "a": StepState()})

        code, body = await post(client, "1/retry", step="laod")

        assert (code, body["field"]) == (422, "step")
        assert "`a`, `load`" in body["detail"]
        assert await promised(pool) == []


def ok(ref_id: int, execution_id: int | None = None) -> Envelope:
    origin = None if execution_id is None else ExecutionId(execution_id)
    return Envelope(
        status="ok", reference=Reference(ref_id=RefId(ref_id), type="db", execution_id=origin)
    )


def called(step: StepName, visit: int, **ctx: Any) -> list[AnyFact]:
    command_id = CommandId(f"{step}.{visit}#1")
    return [
        CommandIssued(step=step, visit=visit, command_id=command_id),
        CommandClaimed(step=step, visit=visit, command_id=command_id, worker_id=WORKER),
        CallDone(
            step=step,
            visit=visit,
            command_id=command_id,
            worker_id=WORKER,
            result=ok(50),
            ctx=ctx,
        ),
    ]


async def a_log(pool: Pool, execution_id: int, facts: list[AnyFact], first_id: int = 100) -> None:
    for number, fact in enumerate(facts):
        event = Event(
            execution_id=ExecutionId(execution_id), event_id=EventId(first_id + number), fact=fact
        )
        row = event_row(event, shard_id=ShardId(0), epoch_id=None)
        await pool.execute(
            f"INSERT INTO noetl.event ({', '.join(row._fields)}) "
            f"VALUES ({', '.join(f'${n + 1}' for n in range(len(row)))})",
            *row,
        )


async def an_origin(pool: Pool) -> None:
    """load (ctx.n = 1) -> save -> load again (ctx.n = 2) -> save again, which failed."""
    await an_execution(pool, 1, status="FAILED")
    hop = (Hop(step=SAVE),)
    back = (Hop(step=LOAD),)
    await a_log(
        pool,
        1,
        [
            ExecutionStarted(catalog_id=CatalogId(7), path="examples/hello", version=1),
            StepEntered(step=LOAD, visit=1),
            *called(LOAD, 1),
            StepExited(step=LOAD, visit=1, result=ok(201), hops=hop, ctx={"n": 1}),
            StepEntered(step=SAVE, visit=1),
            *called(SAVE, 1, by="save"),
            StepExited(step=SAVE, visit=1, result=ok(202, execution_id=9), hops=back),
            StepEntered(step=LOAD, visit=2),
            *called(LOAD, 2),
            StepExited(step=LOAD, visit=2, result=ok(203), hops=hop, ctx={"n": 2}),
            StepEntered(step=SAVE, visit=2),
            ExecutionFailed(error=ToolError(kind="x", message="y"), step=SAVE),
        ],
    )


async def the_start(pool: Pool) -> Start:
    (message,) = await promised(pool)
    assert isinstance(message, Start)
    return message


class TestRerun:
    async def test_the_same_version_starts_with_the_same_payload(
        self, client: Client, pool: Pool
    ) -> None:
        await an_origin(pool)
        await a_result(pool, 1, 100, b'{"name":"Ada","deep":{"a":1}}')

        status, body = await post(client, "1/rerun")

        assert status == 202
        start = await the_start(pool)
        assert str(start.execution_id) == body["execution_id"] != "1"
        assert (start.catalog_id, start.path, start.version) == (7, "examples/hello", 1)
        assert start.payload is not None
        assert start.payload.inline == b'{"name":"Ada","deep":{"a":1}}'
        assert start.payload.sha256 == hashlib.sha256(start.payload.inline).digest()

    async def test_a_payload_goes_deeply_over_the_old_one(self, client: Client, pool: Pool) -> None:
        await an_origin(pool)
        await a_result(pool, 1, 100, b'{"name":"Ada","deep":{"a":1}}')

        await post(client, "1/rerun", payload={"deep": {"b": 2}})

        start = await the_start(pool)
        assert start.payload is not None
        assert msgspec.json.decode(start.payload.inline or b"") == {
            "name": "Ada",
            "deep": {"a": 1, "b": 2},
        }

    async def test_a_repeated_request_with_a_key_starts_one(
        self, client: Client, pool: Pool
    ) -> None:
        await an_origin(pool)
        path, headers = "/api/executions/1/rerun", {"Idempotency-Key": "once"}

        first = (await client.post(path, headers=headers)).json()
        again = (await client.post(path, headers=headers)).json()
        other = await client.post("/api/executions/1/fork", json={"step": "load"}, headers=headers)

        assert again == {**first, "repeated": True}
        assert other.status_code == 422
        assert (await the_start(pool)).payload is None

    async def test_what_has_not_begun_cannot_be_run_again(self, client: Client, pool: Pool) -> None:
        await an_execution(pool, 1, status="PENDING")

        code, body = await post(client, "1/rerun")

        assert code == 409
        assert "not begun" in body["detail"]


class TestFork:
    async def test_it_begins_with_what_was_true_when_the_step_was_last_entered(
        self, client: Client, pool: Pool
    ) -> None:
        await an_origin(pool)
        await a_result(pool, 1, 100, b'{"name":"Ada"}')

        status, body = await post(client, "1/fork", step="load")

        assert status == 202
        start = await the_start(pool)
        assert str(start.execution_id) == body["execution_id"]
        assert start.payload is not None
        assert start.payload.inline == b'{"name":"Ada"}'
        assert start.fork == Fork(
            origin=ExecutionId(1),
            entry=LOAD,
            ctx={"n": 1, "by": "save"},
            steps={LOAD: ok(201, execution_id=1), SAVE: ok(202, execution_id=9)},
        )

    async def test_a_step_that_was_under_way_can_be_forked_from(
        self, client: Client, pool: Pool
    ) -> None:
        await an_origin(pool)

        await post(client, "1/fork", step="save")

        fork = (await the_start(pool)).fork
        assert fork is not None
        assert fork.ctx == {"n": 2, "by": "save"}
        assert fork.steps[LOAD] == ok(203, execution_id=1)

    async def test_a_step_that_was_never_entered_is_refused_with_those_that_were(
        self, client: Client, pool: Pool
    ) -> None:
        await an_origin(pool)

        code, body = await post(client, "1/fork", step="nowhere")

        assert (code, body["field"]) == (422, "step")
        assert "`load`, `save`" in body["detail"]
        assert await promised(pool) == []


class TestChildren:
    async def test_they_come_in_order_page_by_page(self, client: Client, pool: Pool) -> None:
        await an_execution(pool, 1)
        for child in (13, 11, 12):
            await an_execution(pool, child, status="COMPLETED")
        await an_execution(pool, 14)
        await pool.execute(
            "UPDATE noetl.execution SET parent_execution_id = 1 WHERE execution_id IN (11, 12, 13)"
        )

        first = (await client.get("/api/executions/1/children?limit=2")).json()
        after = first["next_cursor"]
        second = (await client.get(f"/api/executions/1/children?limit=2&after={after}")).json()

        pages = [[item["execution_id"] for item in page["items"]] for page in (first, second)]
        assert pages == [["11", "12"], ["13"]]
        assert second["next_cursor"] is None
        assert first["items"][0]["parent_execution_id"] == "1"

    async def test_an_execution_without_children_has_an_empty_list(
        self, client: Client, pool: Pool
    ) -> None:
        await an_execution(pool, 1)

        assert (await client.get("/api/executions/1/children")).json()["items"] == []


@pytest.mark.parametrize("wish", ["signal", "pause", "resume", "retry", "rerun", "fork"])
async def test_an_unknown_execution_is_404(client: Client, wish: str) -> None:
    body = {"signal": {"name": "go"}, "fork": {"step": "load"}}.get(wish, {})

    assert (await client.post(f"/api/executions/5/{wish}", json=body)).status_code == 404
    assert (await client.get("/api/executions/5/children")).status_code == 404


async def test_ids_inside_an_event_are_strings(client: Client, pool: Pool) -> None:
    large = 2**62 + 1
    await an_execution(pool, 1)
    started = ExecutionStarted(
        catalog_id=CatalogId(7), origin=ExecutionId(large), steps={LOAD: ok(large, large)}
    )
    await a_log(pool, 1, [started])

    (event,) = (await client.get("/api/executions/1/events")).json()["items"]

    assert event["context"]["origin"] == str(large)
    reference = event["context"]["steps"]["load"]["reference"]
    assert (reference["ref_id"], reference["execution_id"]) == (str(large), str(large))
