"""Questions in SQL from outside: one SELECT, as a role that reads and sees no secret, for a moment.

What makes it safe is in the database: noetl.query (schema/migrations/0008).
"""

from typing import NamedTuple

import asyncpg

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

_REFUSALS = (
    asyncpg.exceptions.SyntaxOrAccessError,
    asyncpg.exceptions.DataError,
    asyncpg.exceptions.FeatureNotSupportedError,
    asyncpg.exceptions.ProgramLimitExceededError,
    asyncpg.exceptions.InvalidTransactionStateError,
    asyncpg.exceptions.ObjectNotInPrerequisiteStateError,
    asyncpg.exceptions.RaiseError,
    asyncpg.exceptions.CardinalityViolationError,
    asyncpg.exceptions.LockNotAvailableError,
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
    transaction = conn.transaction(readonly=True)
    await transaction.start()
    try:
        return await _ask(conn, text, row_limit, bytes_max, seconds)
    except asyncpg.QueryCanceledError:
        detail = f"it took longer than {seconds:g} s: ask for less, or look at its EXPLAIN"
        raise QueryRefusedError(detail) from None
    except asyncpg.ReadOnlySQLTransactionError as error:
        raise QueryRefusedError(f"only reading is allowed here: {error}") from None
    except _REFUSALS as error:
        raise QueryRefusedError(str(error)) from None
    finally:
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
