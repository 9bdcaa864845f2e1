"""What DuckDB's exceptions mean to a playbook."""

import re

import duckdb

from noetl_core.domain.errors import ToolError

_KINDS: tuple[tuple[type[duckdb.Error], str, bool], ...] = (
    (duckdb.ParserException, "parse", False),
    (duckdb.SyntaxException, "parse", False),
    (duckdb.CatalogException, "not_found", False),
    (duckdb.IntegrityError, "db_constraint", False),
    (duckdb.OutOfMemoryException, "out_of_memory", False),
    (duckdb.ConnectionException, "connection", True),
    (duckdb.PermissionException, "auth", False),
    (duckdb.InternalError, "internal", False),
)
_TELLING: tuple[tuple[str, str, str, bool], ...] = (
    # By a part of the message, where the class says too little.
    ("Could not set lock on file", "connection", "LOCKED", True),
    ("Unique file handle conflict", "connection", "LOCKED", True),
    ("No files found", "not_found", "", False),
    ("No such file", "not_found", "", False),
    ("Permission denied", "auth", "", False),
    ("nable to connect", "connection", "", True),
    ("Could not connect", "connection", "", True),
    ("onflict on", "db_deadlock", "", True),
)
_STATUSES = {
    401: ("auth", False),
    403: ("auth", False),
    404: ("not_found", False),
    429: ("rate_limit", True),
}
_SERVER_ERRORS = 500
_MISSING_EXTENSION = re.compile(r'xtension "?[^"]*?(\w+)(?:\.duckdb_extension)?" not found')
_PLACE = re.compile(r"\n+LINE (\d+):.*", re.DOTALL)
_KEY_VALUES = re.compile(r'(duplicate key) ".*"', re.DOTALL | re.IGNORECASE)


def is_locked(error: duckdb.Error) -> bool:
    """Another process, or another call of this one, has the database file open."""
    return error_of(error).code == "LOCKED"


def error_of(error: duckdb.Error) -> ToolError:
    text = str(error)
    missing = _MISSING_EXTENSION.search(text)
    if missing is not None:
        return missing_extension(missing[1])
    kind, code, retryable = _judged(error, text)
    name = type(error).__name__
    return ToolError(
        kind=kind,
        code=code or name,
        message=_message(error, text),
        retryable=retryable,
        details={"duckdb": {"exception": name}},
    )


def missing_extension(name: str) -> ToolError:
    message = (
        f"DuckDB's extension `{name}` is not on this worker: install "
        "`noetl-worker[duckdb-extensions]`, or put the extension where NOETL_DUCKDB_EXTENSION_DIR "
        "says. Nothing is downloaded."
    )
    return ToolError(kind="not_found", code="NO_EXTENSION", message=message)


def _judged(error: duckdb.Error, text: str) -> tuple[str, str, bool]:
    if isinstance(error, duckdb.HTTPException):
        return _by_status(int(error.status_code))
    for part, kind, code, retryable in _TELLING:
        if part in text:
            return kind, code, retryable
    for of_class, kind, retryable in _KINDS:
        if isinstance(error, of_class):
            return kind, "", retryable
    return "client_error", "", False


def _by_status(status: int) -> tuple[str, str, bool]:
    kind, retryable = _STATUSES.get(status, ("client_error", False))
    if status >= _SERVER_ERRORS:
        kind, retryable = "server_error", True
    return kind, str(status), retryable


def _message(error: duckdb.Error, text: str) -> str:
    """Without the excerpt of the SQL, which may hold values, and without those of a key."""
    place = _PLACE.search(text)
    if isinstance(error, duckdb.OutOfMemoryException):
        advice = "; give DuckDB more with NOETL_DUCKDB_MEMORY_MB, or read less at once"
        return text.splitlines()[0].rstrip(".") + advice
    told = _KEY_VALUES.sub(r"\1", text[: place.start()] if place else text)
    return " ".join(told.split()) + (f" (line {place[1]})" if place else "")
