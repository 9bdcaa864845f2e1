"""What Postgres's exceptions mean to a playbook."""

import asyncpg

from noetl_core.domain.errors import ToolError

EXPECTED = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    # A server that is going down says so without being asked; the driver takes that for a mistake
    # of its own, and refuses the next statement.
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
)
"""What may happen between us and a database."""

_KINDS = {
    "23": ("db_constraint", False),
    "40": ("db_deadlock", True),
    "08": ("connection", True),
    "28": ("auth", False),
    "53": ("connection", True),
    "57": ("connection", True),
}


def error_of(error: Exception) -> ToolError:
    if isinstance(error, asyncpg.exceptions.ClientConfigurationError):
        return ToolError(kind="client_error", code="WRONG_DSN", message="`auth` is no usable DSN")
    if not isinstance(error, asyncpg.PostgresError):
        kind = "timeout" if isinstance(error, TimeoutError) else "connection"
        reason = str(error) or type(error).__name__
        return ToolError(
            kind=kind, message=f"no connection to the database: {reason}", retryable=True
        )
    sqlstate = error.sqlstate or ""
    kind, retryable = _KINDS.get(sqlstate[:2], ("client_error", False))
    if sqlstate in {"57014", "55P03"}:
        kind, retryable = "db_timeout", True
    # `detail` is left out: it quotes the values of the row.
    facts = {
        "sqlstate": sqlstate,
        "constraint": getattr(error, "constraint_name", None),
        "table": getattr(error, "table_name", None),
        "column": getattr(error, "column_name", None),
    }
    return ToolError(
        kind=kind,
        code=sqlstate,
        message=str(error).splitlines()[0],
        retryable=retryable,
        details={"pg": {name: fact for name, fact in facts.items() if fact is not None}},
    )
