"""The columns of a batch arrive as they were sent."""

import pytest

from noetl_core.domain.ids import ExecutionId, ShardId
from noetl_core.store.batch import Batch, CommandRow, ResultRow, commit
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


@pytest.mark.parametrize("text", AWKWARD)
async def test_awkward_names_survive(pool: Pool, text: str) -> None:
    batch = Batch()
    batch.fences = {ShardId(0): 0}
    row = [1, 2, f"key {text}", 0, "step.enter", None, text, *[None] * 12]
    batch.events = [EventRow(*row), EventRow(*[1, 3, f"other {text}", *row[3:]])]
    batch.commands = [CommandRow(ExecutionId(1), text, ShardId(0), text, 1, "cpu", 0, 0.5, b"\x00")]  # type: ignore[arg-type]
    batch.results = [
        ResultRow(ExecutionId(1), 2, None, text, "db", None, "t", 1, b"\x00", b"\xff")  # type: ignore[arg-type]
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
    row = [1, 2, "key", 0, "call.done", *[None] * 11, document, None, None]
    batch.events = [EventRow(*row)]
    async with pool.acquire() as conn:
        await commit(conn, batch)

    context = await pool.fetchval("SELECT result->>'context' FROM noetl.event")
    assert context == "line\nline\ttab\x01"
