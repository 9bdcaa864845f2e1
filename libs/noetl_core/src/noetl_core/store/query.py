"""Questions in SQL from outside: one SELECT, as a role that reads and sees no secret, for a moment.

What makes it safe is in the database: noetl.query (schema/migrations/0008), and what nobody but our
roles may call (0011).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import asyncpg
from asyncpg.transaction import Transaction

from noetl_core.domain.errors import RejectedError
from noetl_core.store.postgres import Connection

COLUMNS_MAX = 100
"""As many as a function of Postgres takes."""

# Names mean the same while the query is looked at as while it runs.
_SEARCH_PATH = "SELECT set_config('search_path', 'noetl, pg_catalog, pg_temp', true)"
_TIMEOUT = "SELECT set_config('statement_timeout', $1, true)"
_QUERY = "SELECT noetl.query($1, $2, $3, $4)"
# Locks of the session outlive the transaction, and the session goes back to the pool.
_UNLOCK = "SELECT pg_advisory_unlock_all()"

KILL_SECONDS = 1.0
"""After the timeout: a function that does not look whether it was cancelled is left to itself."""

# Not the fault of the statement. Any other error of Postgres is an answer to it, also that it takes
# too much memory or too many locks.
_AWAY = (
    asyncpg.PostgresConnectionError,
    asyncpg.exceptions.OperatorInterventionError,
    asyncpg.exceptions.TransactionRollbackError,
)


class QueryRefusedError(RejectedError):
    """The statement cannot be answered here: the message says why."""


class QueryAnswer(NamedTuple):
    """`rows` are JSON arrays as text."""

    columns: list[str]
    rows: list[str]


async def ask(
    conn: Connection, statement: str, *, row_limit: int, bytes_max: int, seconds: float
) -> QueryAnswer:
    """Answer one SELECT. Raises QueryRefusedError."""
    text = statement.strip().removesuffix(";").strip()
    try:
        async with asyncio.timeout(seconds + KILL_SECONDS), _left_to_itself(conn):
            return await _ask_and_undo(conn, text, row_limit, bytes_max, seconds)
    except (TimeoutError, asyncpg.QueryCanceledError):
        raise _too_long(seconds) from None
    except asyncpg.ReadOnlySQLTransactionError as error:
        raise QueryRefusedError(f"only reading is allowed here: {error}") from None
    except asyncpg.PostgresError as error:
        if isinstance(error, _AWAY):
            raise
        raise QueryRefusedError(str(error)) from None
    except asyncpg.InternalClientError:
        detail = "a column has a type that cannot be read here: cast it, as in `x::text`"
        raise QueryRefusedError(detail) from None


@asynccontextmanager
async def _left_to_itself(conn: Connection) -> AsyncIterator[None]:
    """Once nobody waits for the answer any more, nobody waits for the connection either: Postgres
    has cancelled the question and it goes on, and a rollback would come after its end."""
    try:
        yield
    except asyncio.CancelledError:
        conn.terminate()
        raise


def _too_long(seconds: float) -> QueryRefusedError:
    detail = f"it took longer than {seconds:g} s: ask for less, with a WHERE that an index serves"
    return QueryRefusedError(detail)


async def _ask_and_undo(
    conn: Connection, text: str, row_limit: int, bytes_max: int, seconds: float
) -> QueryAnswer:
    transaction = conn.transaction(readonly=True)
    await transaction.start()
    try:
        answer = await _ask(conn, text, row_limit, bytes_max, seconds)
    except Exception:
        await _undo(conn, transaction)
        raise
    await _undo(conn, transaction)
    return answer


async def _undo(conn: Connection, transaction: Transaction) -> None:
    await transaction.rollback()
    await conn.execute(_UNLOCK)


async def _ask(
    conn: Connection, text: str, row_limit: int, bytes_max: int, seconds: float
) -> QueryAnswer:
    await conn.execute(_TIMEOUT, str(round(seconds * 1000)))
    await conn.execute(_SEARCH_PATH)
    # Looks at it and runs nothing; the protocol takes one statement at a time.
    prepared = await conn.prepare(text)
    columns = [attribute.name for attribute in prepared.get_attributes()]
    if prepared.get_parameters():
        raise QueryRefusedError("there is nothing to put in for $1: write the value itself")
    if not 0 < len(columns) <= COLUMNS_MAX:
        raise QueryRefusedError(f"only a SELECT of 1 to {COLUMNS_MAX} columns is answered here")
    rows = await conn.fetch(_QUERY, text, len(columns), row_limit, bytes_max)
    return QueryAnswer(columns, [row[0] for row in rows])
