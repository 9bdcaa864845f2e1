"""A sink into Postgres: the rows and a ledger row with the command's key, in one transaction.

    BEGIN
    INSERT INTO noetl_sink_ledger ... ON CONFLICT DO NOTHING     there already: nothing to do
    INSERT INTO table ...
    COMMIT

Crash analysis. We die
- before the commit: Postgres rolls back; neither row nor ledger row is there, and the next attempt
  writes both.
- after the commit, before the broker hears of it: the next attempt runs the tool again, finds the
  ledger row and writes nothing. The rows are those of the first attempt.
- not at all, but our lease was taken for lost and another worker runs the same command: the
  second insert of the same key waits for the first transaction. If that commits, it finds the row;
  if it rolls back, it goes on itself.
"""
# ruff: noqa: S608 - names are quoted, values are parameters

from collections.abc import Mapping
from typing import Any

import asyncpg

from noetl_core.domain.errors import ToolError
from noetl_core.domain.playbook import Sink
from noetl_worker.sink_rows import Row, Written, batches, by_columns, once_each, with_key
from noetl_worker.tools.postgres import PostgresTool, statements_of
from noetl_worker.tools.postgres_errors import EXPECTED, error_of
from noetl_worker.tools.postgres_statements import Connection, execute, manages_itself
from noetl_worker.tools.tool import ToolCall, ToolFailedError, wrong_field

BATCH_BYTES_MAX = 4 * 1024 * 1024
_LEDGER_LOCK = 0x6E6F65746C  # any number that only this is locked by

_CREATE_LEDGER = """
CREATE TABLE IF NOT EXISTS noetl_sink_ledger (
    idempotency_key text PRIMARY KEY,
    step text NOT NULL,
    row_count bigint NOT NULL,
    written_at timestamptz NOT NULL DEFAULT now()
)
"""

_ENTER = """
INSERT INTO noetl_sink_ledger (idempotency_key, step, row_count) VALUES ($1, $2, $3)
ON CONFLICT (idempotency_key) DO NOTHING
RETURNING true
"""

_COUNT = "UPDATE noetl_sink_ledger SET row_count = $2 WHERE idempotency_key = $1"

_COLUMNS = """
SELECT attname FROM pg_attribute
WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped
ORDER BY attnum
"""


class _LedgerMissing(Exception):  # noqa: N818 - a request, not a failure
    pass


async def write_rows(tool: PostgresTool, call: ToolCall, sink: Sink, rows: list[Row]) -> Written:
    """Raises ToolFailedError."""
    if sink.mode == "upsert":
        rows = once_each(rows, sink.key)
    if not rows and sink.mode != "replace":
        return Written()  # an attempt that finds some may still write them
    return await _write(tool, call, _TableWork(str(call.config["table"]), sink, rows))


async def run_command(tool: PostgresTool, call: ToolCall, params: Any) -> Written:
    """Raises ToolFailedError."""
    statements = statements_of(call.config)
    if manages_itself(statements):
        problem = "runs in the transaction of the sink, so it cannot have one of its own"
        raise wrong_field("command", problem)
    return await _write(tool, call, _CommandWork(statements, params))


async def _write(tool: PostgresTool, call: ToolCall, work: "_TableWork | _CommandWork") -> Written:
    try:
        async with tool.connection(call) as conn:
            try:
                return await _write_with_ledger(conn, call, work)
            except asyncpg.UndefinedColumnError:
                await work.explain(conn)
                raise
    except EXPECTED as error:
        raise ToolFailedError(error_of(error)) from None


async def _write_with_ledger(
    conn: Connection, call: ToolCall, work: "_TableWork | _CommandWork"
) -> Written:
    try:
        return await _write_once(conn, call, work)
    except _LedgerMissing:
        await _create_ledger(conn)
        return await _write_once(conn, call, work)


async def _write_once(
    conn: Connection, call: ToolCall, work: "_TableWork | _CommandWork"
) -> Written:
    async with conn.transaction():
        if not await _enter(conn, call, work.row_count):
            return Written(already_written=True)
        row_count = await work.run(conn)
        if row_count != work.row_count:
            await conn.execute(_COUNT, call.idempotency_key, row_count)
    return Written(row_count)


async def _enter(conn: Connection, call: ToolCall, row_count: int) -> bool:
    try:
        return bool(await conn.fetchval(_ENTER, call.idempotency_key, call.step, row_count))
    except asyncpg.UndefinedTableError:
        raise _LedgerMissing from None


async def _create_ledger(conn: Connection) -> None:
    """IF NOT EXISTS does not keep two from creating it at once, so they take turns."""
    try:
        async with conn.transaction():
            await conn.execute("SELECT pg_advisory_xact_lock($1)", _LEDGER_LOCK)
            await conn.execute(_CREATE_LEDGER)
    except (asyncpg.InsufficientPrivilegeError, asyncpg.InvalidSchemaNameError) as error:
        ddl = " ".join(_CREATE_LEDGER.split())
        message = f"a sink needs a table that it may not create ({error}); run: {ddl}"
        raise ToolFailedError(
            ToolError(kind="auth", code="NO_SINK_LEDGER", message=message)
        ) from None


class _TableWork:
    """Rows into a table. Postgres converts the values by the types of the columns."""

    def __init__(self, table: str, sink: Sink, rows: list[Row]) -> None:
        self._table = table
        self._quoted = quoted_table(table)
        self._sink = sink
        self._rows = rows
        self.row_count = len(rows)

    async def run(self, conn: Connection) -> int:
        if self._sink.mode == "replace":
            await self._delete(conn)
        for columns, rows in by_columns(self._rows).items():
            statement = self._insert(columns)
            for batch in batches(rows, bytes_max=BATCH_BYTES_MAX):
                await conn.execute(statement, batch)
        return self.row_count

    def _insert(self, columns: tuple[str, ...]) -> str:
        listed = ", ".join(map(quoted, columns))
        return (
            f"INSERT INTO {self._quoted} ({listed}) SELECT {listed} FROM {self._given}"
            f"{self._on_conflict(columns)}"
        )

    def _on_conflict(self, columns: tuple[str, ...]) -> str:
        if self._sink.mode != "upsert":
            return ""
        key = self._sink.key
        changes = [f"{quoted(n)} = EXCLUDED.{quoted(n)}" for n in columns if n not in key]
        action = f"UPDATE SET {', '.join(changes)}" if changes else "NOTHING"
        return f" ON CONFLICT ({', '.join(map(quoted, key))}) DO {action}"

    async def _delete(self, conn: Connection) -> None:
        key = self._sink.key
        if not key:
            await conn.execute(f"DELETE FROM {self._quoted}")
            return
        same = " AND ".join(f"target.{quoted(name)} = given.{quoted(name)}" for name in key)
        statement = (
            f"DELETE FROM {self._quoted} AS target USING {self._given} AS given WHERE {same}"
        )
        keys = {values: {n: row[n] for n in key} for values, row in with_key(self._rows, key)}
        for batch in batches(keys.values(), bytes_max=BATCH_BYTES_MAX):
            await conn.execute(statement, batch)

    @property
    def _given(self) -> str:
        return f"jsonb_populate_recordset(NULL::{self._quoted}, $1::jsonb)"

    async def explain(self, conn: Connection) -> None:
        """Raises ToolFailedError if it was a column of ours that the table does not have."""
        known = [row["attname"] for row in await conn.fetch(_COLUMNS, self._quoted)]
        given = dict.fromkeys((*self._sink.key, *(name for row in self._rows for name in row)))
        unknown = [name for name in given if name not in known]
        if unknown:
            message = (
                f"table {self._table!r} has no column {unknown[0]!r}; it has {', '.join(known)}"
            )
            raise ToolFailedError(
                ToolError(kind="client_error", code="UNKNOWN_COLUMN", message=message)
            )


class _CommandWork:
    """Statements of the playbook; a list of mappings runs them once for each."""

    row_count = 0

    def __init__(self, statements: list[str], params: Any) -> None:
        self._statements = statements
        is_rows = isinstance(params, list) and params and isinstance(params[0], Mapping)
        self._sets = params if is_rows else [params]

    async def run(self, conn: Connection) -> int:
        count = 0
        for params in self._sets:
            count += (await execute(conn, self._statements, params))["row_count"]
        return count

    async def explain(self, conn: Connection) -> None:
        """Postgres has said all there is to say."""


def quoted_table(table: str) -> str:
    """`public.users` is a table in a schema."""
    return ".".join(map(quoted, table.split(".")))


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
