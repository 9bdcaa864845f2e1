"""Events of other systems: which are taken in, under which names, and what the broker is told."""

from typing import Any

import msgspec
import pytest

from noetl_core.domain.errors import ToolError
from noetl_core.domain.ids import CommandId, ExecutionId, WorkerId
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Claimed, Done, Failed
from services.api_gateway.conftest import Client
from services.api_gateway.given import an_execution
from services.api_gateway.test_executions_api import promised

COMMAND: Any = {
    "execution_id": ExecutionId(1),
    "command_id": CommandId("load.1#1"),
    "worker_id": WorkerId("old-worker"),
}


def report(event_type: str, **fields: Any) -> dict[str, Any]:
    return {**COMMAND, "execution_id": "1", "event_type": event_type, **fields}


async def test_the_life_of_a_command_is_told_to_the_broker_in_order(
    client: Client, pool: Pool
) -> None:
    await an_execution(pool, 1)
    events = [
        report("command.claimed"),
        report("call.done", result={"rows": [1]}, ctx={"n": 1}, duration_ms=2.5),
    ]

    answer = await client.post("/api/events", json=events)

    assert (answer.status_code, answer.json()) == (202, {"accepted": 2})
    claimed, done = await promised(pool)
    assert claimed == Claimed(**COMMAND, outside=True)
    assert isinstance(done, Done)
    assert (done.ctx, done.duration_ms) == ({"n": 1}, 2.5)
    assert done.stored is not None
    assert msgspec.json.decode(done.stored.inline or b"") == {"rows": [1]}


@pytest.mark.parametrize(
    ("old_name", "kind"),
    [
        ("action_started", Claimed),
        ("action_completed", Done),
        ("Task.Complete", Done),
        ("action_failed", Failed),
    ],
)
async def test_old_names_are_understood(
    client: Client, pool: Pool, old_name: str, kind: type
) -> None:
    await an_execution(pool, 1)

    answer = await client.post("/api/events", json=[report(old_name)])

    assert answer.status_code == 202
    (message,) = await promised(pool)
    assert isinstance(message, kind)


@pytest.mark.parametrize(
    ("given", "recorded"),
    [
        ({"kind": "http", "message": "no"}, ToolError(kind="http", message="no")),
        ("no", ToolError(kind="unknown", message="no")),
    ],
)
async def test_an_error_is_an_object_or_a_sentence(
    client: Client, pool: Pool, given: Any, recorded: ToolError
) -> None:
    await an_execution(pool, 1)

    await client.post("/api/events", json=[report("call.error", error=given)])

    (message,) = await promised(pool)
    assert isinstance(message, Failed)
    assert message.error == recorded


@pytest.mark.parametrize(
    "event_type", ["step.exit", "execution.completed", "workflow_started", "?"]
)
async def test_what_only_the_broker_may_say_is_refused_and_nothing_is_taken_in(
    client: Client, pool: Pool, event_type: str
) -> None:
    await an_execution(pool, 1)

    answer = await client.post("/api/events", json=[report("call.done"), report(event_type)])

    assert answer.status_code == 422
    assert "call.done" in answer.json()["detail"]
    assert answer.json()["field"] == "[1].event_type"
    assert await promised(pool) == []


async def test_an_unknown_execution_or_a_command_id_of_nobody_is_refused(
    client: Client, pool: Pool
) -> None:
    unknown = await client.post("/api/events", json=[report("call.done")])
    odd = await client.post("/api/events", json=[report("call.done", command_id="load")])

    assert (unknown.status_code, odd.status_code) == (404, 422)
    assert "load.1/17#2" in odd.json()["detail"]
