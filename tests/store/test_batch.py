"""The columns of a batch arrive as they were sent."""

from typing import Any

import pytest

from noetl_core.domain.ids import CommandId, EventId, ExecutionId, ShardId, WorkerId
from noetl_core.store.batch import Batch, CommandRow, PlacementRow, ResultRow, commit
from noetl_core.store.event import EventRow
from noetl_core.store.postgres import Pool

AWKWARD = [
    'quote " backslash \\ brace { } comma , null',
    "NULL",
    "null",
    "",
    " spaces ",
    "ümläut ☂ 🦆",
    "it's",
    '{"a\\nb": "c"}',
    "%s $1",
]


def event(**columns: Any) -> EventRow:
    blank = dict.fromkeys(EventRow._fields)
    given = {"execution_id": 1, "shard_id": 0, "event_type": "step.enter", **columns}
    return EventRow(**{**blank, **given})


@pytest.mark.parametrize("text", AWKWARD)
async def test_awkward_names_survive(pool: Pool, text: str) -> None:
    batch = Batch()
    batch.fences = {ShardId(0): 0}
    batch.events = [
        event(event_id=2, event_key=f"key {text}", node_name=text),
        event(event_id=3, event_key=f"other {text}", node_name=text),
    ]
    execution_id, command_id = ExecutionId(1), CommandId(text)
    batch.commands = [
        CommandRow(execution_id, command_id, ShardId(0), text, 1, "cpu", 0, 0.5, b"\x00")
    ]
    batch.results = [
        ResultRow(execution_id, EventId(2), None, text, "db", None, "t", 1, b"\x00", b"\xff")
    ]
    async with pool.acquire() as conn:
        await commit(conn, batch)

    names = await pool.fetch("SELECT node_name, event_key FROM noetl.event ORDER BY event_id")
    assert [tuple(name) for name in names] == [(text, f"key {text}"), (text, f"other {text}")]
    command = await pool.fetchrow("SELECT command_id, payload, status FROM noetl.command")
    assert command is not None
    assert tuple(command) == (text, b"\x00", "pending")
    assert await pool.fetchval("SELECT inline FROM noetl.result_ref") == b"\xff"


async def test_json_documents_keep_their_control_characters(pool: Pool) -> None:
    batch = Batch()
    batch.fences = {ShardId(0): 0}
    document = '{"context":"line\\nline\\ttab\\u0001","status":"ok"}'
    batch.events = [event(event_id=2, event_key="key", result=document)]
    async with pool.acquire() as conn:
        await commit(conn, batch)

    context = await pool.fetchval("SELECT result->>'context' FROM noetl.event")
    assert context == "line\nline\ttab\x01"


async def test_a_placement_is_in_the_row_when_the_command_can_be_seen(pool: Pool) -> None:
    first, second = CommandId("a.1#1"), CommandId("b.1#1")
    batch = Batch()
    batch.fences = {ShardId(0): 0}
    batch.commands = [
        CommandRow(ExecutionId(1), name, ShardId(0), "s", 1, "cpu", 0, 10.0, b"")
        for name in (first, second)
    ]
    batch.placements = [
        PlacementRow(ExecutionId(1), first, WorkerId("w1"), 30.0, ""),
        PlacementRow(ExecutionId(1), second, None, 0.0, "gpu=true\ntool:acme.mailer"),
    ]
    async with pool.acquire() as conn:
        await conn.execute("SET ROLE noetl_broker")
        await commit(conn, batch)
        await conn.execute("RESET ROLE")

    rows = await pool.fetch(
        "SELECT target_worker, extract(epoch FROM target_until - available_at)::integer AS wait,"
        " requires FROM noetl.command ORDER BY command_id"
    )
    assert [tuple(row) for row in rows] == [
        ("w1", 30, None),
        (None, None, ["gpu=true", "tool:acme.mailer"]),
    ]
