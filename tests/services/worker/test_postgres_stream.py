"""Large results of Postgres, chunk by chunk, against a real one."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from noetl_core.blob import document_of
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Done, Partial
from noetl_worker.tools.postgres import PostgresTool
from noetl_worker.tools.tool import ToolFailedError, ToolResult
from services.worker import calls, desk

NUMBERS = "SELECT n FROM generate_series(1, %s) n ORDER BY n"


@pytest.fixture
async def tool() -> AsyncIterator[PostgresTool]:
    opened = PostgresTool()
    yield opened
    await opened.close()


class Chunks:
    """Keeps what it is handed."""

    def __init__(self) -> None:
        self.taken: list[Any] = []

    async def take(self, chunk: Any) -> None:
        self.taken.append(chunk)


async def stream(
    tool: PostgresTool, dsn: str, sql: str, size: int, *, emit: Any, done: int = 0
) -> Any:
    call = calls.call_of({"auth": dsn, "command": sql, "chunk_size": size})
    result = await tool.run(call._replace(emit=emit, chunks_done=done))
    assert isinstance(result, ToolResult)
    assert result.error is None, result.error
    return result.data


async def test_ten_thousand_rows_come_in_ten_chunks(
    tool: PostgresTool, empty_database: str
) -> None:
    chunks = Chunks()

    result = await stream(tool, empty_database, NUMBERS % 10_000, 1000, emit=chunks.take)

    assert result == {"row_count": 10_000, "chunks": 10, "columns": ["n"]}
    assert [row["n"] for chunk in chunks.taken for row in chunk["rows"]] == list(range(1, 10_001))
    assert [chunk["chunk_index"] for chunk in chunks.taken] == list(range(10))
    assert [chunk["has_more"] for chunk in chunks.taken] == [True] * 9 + [False]
    assert {(chunk["row_count"], *chunk["columns"]) for chunk in chunks.taken} == {(1000, "n")}


async def test_the_last_chunk_has_what_is_left(tool: PostgresTool, empty_database: str) -> None:
    chunks = Chunks()

    result = await stream(tool, empty_database, NUMBERS % 5, 2, emit=chunks.take)

    assert result["chunks"] == 3
    assert [(c["row_count"], c["has_more"]) for c in chunks.taken] == [
        (2, True),
        (2, True),
        (1, False),
    ]


async def test_no_rows_are_no_chunks(tool: PostgresTool, empty_database: str) -> None:
    chunks = Chunks()

    result = await stream(tool, empty_database, NUMBERS % 0, 2, emit=chunks.take)

    assert result == {"row_count": 0, "chunks": 0, "columns": ["n"]}
    assert chunks.taken == []


async def test_chunks_that_were_sent_already_are_counted_and_dropped(
    tool: PostgresTool, empty_database: str
) -> None:
    chunks = Chunks()

    result = await stream(tool, empty_database, NUMBERS % 6, 2, emit=chunks.take, done=2)

    assert result["row_count"] == 6
    assert chunks.taken[:2] == [None, None]
    assert [row["n"] for row in chunks.taken[2]["rows"]] == [5, 6]


async def test_where_nobody_takes_chunks_the_result_has_the_rows(
    tool: PostgresTool, empty_database: str
) -> None:
    result = await stream(tool, empty_database, NUMBERS % 5, 2, emit=None)

    assert result == {
        "rows": [{"n": n} for n in range(1, 6)],
        "row_count": 5,
        "columns": ["n"],
        "statement_count": 1,
    }


async def test_two_hundred_wide_chunks_take_the_memory_of_less_than_four(
    tool: PostgresTool, empty_database: str
) -> None:
    chunk_bytes = 50 * 20_000
    wide = "SELECT n, repeat('x', 20000) AS wide FROM generate_series(1, 10000) n ORDER BY n"
    count = 0

    async def drop(chunk: Any) -> None:
        nonlocal count
        count += len(chunk["rows"])

    await stream(tool, empty_database, wide, 50, emit=drop)  # what stays is there after the first
    tracemalloc.start()
    try:
        await stream(tool, empty_database, wide, 50, emit=drop)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert count == 20_000
    assert peak < 4 * chunk_bytes


@pytest.mark.parametrize(
    ("sql", "size", "problem"),
    [
        ("SELECT 1; SELECT 2", 10, "one statement"),
        ("CREATE TABLE t (id int)", 10, "only reads"),
        ("SELECT 1", 0, "from 1 to"),
        ("SELECT 1", "many", "from 1 to"),
    ],
)
async def test_what_cannot_be_read_in_chunks_is_refused(
    tool: PostgresTool, empty_database: str, sql: str, size: Any, problem: str
) -> None:
    with pytest.raises(ToolFailedError, match=problem):
        await stream(tool, empty_database, sql, size, emit=Chunks().take)


async def test_a_statement_that_breaks_halfway_keeps_what_went_out(
    tool: PostgresTool, empty_database: str
) -> None:
    chunks = Chunks()
    call = calls.call_of(
        {
            "auth": empty_database,
            "command": "SELECT 10 / (5 - n) AS q FROM generate_series(1, 9) n",
            "chunk_size": 2,
        }
    )

    result = await tool.run(call._replace(emit=chunks.take))

    assert isinstance(result, ToolResult)
    assert result.error is not None
    assert result.error.code == "22012"
    assert len(chunks.taken) == 1


async def test_a_whole_worker_sends_the_chunks_before_the_end(
    database: str, pool: Pool, nats_url: str
) -> None:
    text = f"""
- step: a
  tool: {{kind: postgres, auth: "{database}", query: "{NUMBERS % 5}", chunk_size: 2}}
  next: {{arcs: [{{step: b, on: call.partial}}]}}
- step: b
  tool: {{kind: noop}}
"""
    key = await desk.issue(pool, await desk.register(pool, desk.playbook(text)), "a")

    async with desk.listening(nats_url, pool) as ear, desk.working(desk.config(database, nats_url)):
        while not ear.ends:
            await asyncio.sleep(0.02)
            await ear.drain_inbox()
        assert await ear.done(key) == {"row_count": 5, "chunks": 3, "columns": ["n"]}

    chunks = [m for m in ear.messages if isinstance(m, Partial)]
    assert [document_of(chunk.stored)["rows"] for chunk in chunks] == [
        [{"n": 1}, {"n": 2}],
        [{"n": 3}, {"n": 4}],
        [{"n": 5}],
    ]
    assert [end.chunks for end in ear.ends if isinstance(end, Done)] == [3]
