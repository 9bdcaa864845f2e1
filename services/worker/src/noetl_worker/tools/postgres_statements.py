"""Statements on one connection: bound, run, and read into plain data, at once or chunk by chunk.

In chunks, the rows come through a cursor on the server. One chunk is read ahead, so that each can
say whether more will follow: there are never more than two of them here. An attempt that goes on
after a crash reads again what was recorded and drops it, so the rows must come in the same order:
the query needs ORDER BY.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import asyncpg

from noetl_worker.tools.sql import bind
from noetl_worker.tools.sql_values import from_column, to_column
from noetl_worker.tools.tool import wrong_field

if TYPE_CHECKING:
    Connection: TypeAlias = asyncpg.pool.PoolConnectionProxy[asyncpg.Record]
    _Prepared: TypeAlias = asyncpg.prepared_stmt.PreparedStatement[asyncpg.Record]
else:
    Connection = asyncpg.pool.PoolConnectionProxy
    _Prepared = Any

Emit = Callable[[Any], Awaitable[None]]
"""Takes the chunks of a result in turn, None for one that it has already."""

ROWS_MAX = 1_000_000

_TRANSACTION_WORDS = ("begin", "start", "commit", "rollback", "end", "abort", "savepoint")
# These refuse to run inside a transaction block.
_ALONE_WORDS = ("vacuum", "create database", "drop database", "alter system", "reindex")


async def execute(conn: Connection, statements: list[str], params: Any) -> dict[str, Any]:
    result: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        if len(statements) > 1 and not manages_itself(statements):
            await stack.enter_async_context(conn.transaction())
        for number, statement in enumerate(statements, 1):
            result = await _execute_one(conn, statement, params, number)
    return result | {"statement_count": len(statements)}


async def _execute_one(
    conn: Connection, statement: str, params: Any, number: int
) -> dict[str, Any]:
    ready = await _prepare(conn, statement, params, number)
    records = await ready.prepared.fetch(*ready.values)
    _check_count(len(records))
    rows = ready.rows(records)
    return {
        "rows": rows,
        "row_count": _affected(ready.prepared.get_statusmsg(), len(rows)),
        "columns": ready.columns,
    }


async def stream(
    conn: Connection,
    statement: str,
    params: Any,
    *,
    chunk_size: int,
    emit: Emit,
    chunks_done: int = 0,
) -> dict[str, Any]:
    """Hands over every chunk, None for the first `chunks_done`; the result only counts them."""
    row_count = index = 0
    try:
        async with conn.transaction(readonly=True):
            ready = await _prepare(conn, statement, params, 1)
            cursor = await ready.prepared.cursor(*ready.values)
            records = await cursor.fetch(chunk_size)
            while records:
                is_full = len(records) == chunk_size
                following = await cursor.fetch(chunk_size) if is_full else []
                is_new = index >= chunks_done
                more = bool(following)
                await emit(ready.chunk(records, index, has_more=more) if is_new else None)
                row_count += len(records)
                records = following
                index += 1
    except asyncpg.ReadOnlySQLTransactionError:
        raise wrong_field("chunk_size", "is for a statement that only reads") from None
    return {"row_count": row_count, "chunks": index, "columns": ready.columns}


async def read_in_chunks(
    conn: Connection, statement: str, params: Any, *, chunk_size: int
) -> dict[str, Any]:
    """The rows as usual. The driver's form of them, which is larger, is here for a chunk only."""
    rows: list[dict[str, Any]] = []

    async def keep(chunk: dict[str, Any]) -> None:
        rows.extend(chunk["rows"])
        _check_count(len(rows))

    read = await stream(conn, statement, params, chunk_size=chunk_size, emit=keep)
    return {
        "rows": rows,
        "row_count": len(rows),
        "columns": read["columns"],
        "statement_count": 1,
    }


class _Ready(NamedTuple):
    """A statement that can be run."""

    prepared: _Prepared
    values: list[Any]
    columns: list[str]

    def rows(self, records: Iterable[asyncpg.Record]) -> list[dict[str, Any]]:
        columns = self.columns
        return [dict(zip(columns, map(from_column, record), strict=True)) for record in records]

    def chunk(self, records: list[asyncpg.Record], index: int, *, has_more: bool) -> dict[str, Any]:
        return {
            "rows": self.rows(records),
            "row_count": len(records),
            "columns": self.columns,
            "chunk_index": index,
            "has_more": has_more,
        }


async def _prepare(conn: Connection, statement: str, params: Any, number: int) -> _Ready:
    text, values = _bound(statement, params)
    prepared = await conn.prepare(text)
    types = [parameter.name for parameter in prepared.get_parameters()]
    columns = [attribute.name for attribute in prepared.get_attributes()]
    return _Ready(prepared, _coerced(values, types, number), columns)


def _check_count(row_count: int) -> None:
    if row_count > ROWS_MAX:
        raise wrong_field("command", f"gave more than {ROWS_MAX} rows; add a LIMIT")


def _bound(statement: str, params: Any) -> tuple[str, list[Any]]:
    if params is not None and not isinstance(params, Mapping | list | tuple):
        raise wrong_field("params", f"must be a list or a mapping, not {type(params).__name__}")
    try:
        return bind(statement, params)
    except LookupError as error:
        raise wrong_field("params", str(error.args[0])) from None


def _coerced(values: list[Any], types: list[str], number: int) -> list[Any]:
    coerced = []
    for position, (value, type_name) in enumerate(zip(values, types, strict=False), 1):
        try:
            coerced.append(to_column(value, type_name))
        except (ValueError, TypeError, ArithmeticError, LookupError):
            problem = f"value {position} of statement {number} is no {type_name}"
            raise wrong_field("params", problem) from None
    return coerced


def _affected(status: str | None, row_count: int) -> int:
    """`INSERT 0 5` and `UPDATE 5` count what was changed, also without RETURNING."""
    last = (status or "").rsplit(" ", 1)[-1]
    return int(last) if last.isdigit() else row_count


def manages_itself(statements: list[str]) -> bool:
    """The script opens transactions itself, or holds what cannot run in one."""
    begins = [" ".join(statement.split(None, 3)[:3]).lower() for statement in statements]
    return any(
        begin.split(" ", 1)[0] in _TRANSACTION_WORDS
        or begin.startswith(_ALONE_WORDS)
        or "concurrently" in statement.lower()
        for begin, statement in zip(begins, statements, strict=True)
    )
