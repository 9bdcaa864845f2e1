"""One call of DuckDB, in a thread: open, load what it reads, run its statements, close.

Every call has an instance of its own. What it attaches, its secrets, settings and temporary tables
are seen by no other call, and are gone with it.
"""

import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import msgspec

from noetl_worker.tools.duckdb_errors import error_of, is_locked, missing_extension
from noetl_worker.tools.sql_values import from_column
from noetl_worker.tools.tool import ToolFailedError, wrong_field

MEMORY = ":memory:"
ROWS_MAX = 1_000_000
ROWS_AT_ONCE = 10_000
LOCK_SECONDS_MAX = 5.0
LOCK_POLL_SECONDS = 0.1
SPILL_SIZE_MAX = "16GB"

# Everything else that can be set belongs to the worker: how much it may use, and what is loaded.
_OWN_SETTINGS = (
    "TimeZone", "Calendar", "search_path", "schema", "default_null_order", "null_order",
    "default_order", "integer_division", "ieee_floating_point_ops", "preserve_insertion_order",
)  # fmt: skip

_TRANSACTION = frozenset({"TRANSACTION", "ATTACH", "DETACH", "VACUUM", "LOAD", "EXPORT"})
"""Types of statements that bring their own transaction, or refuse to be in one."""

_CHANGES = frozenset({"INSERT", "UPDATE", "DELETE", "MERGE_INTO", "COPY", "CREATE"})
"""Types of statements whose only row is a count of others."""

# Text stays text: DuckDB would take what looks like a date for one, and lose its zone.
_JSON_AS_IT_IS = (
    "sample_size=-1, map_inference_threshold=-1, field_appearance_threshold=0, "
    "dateformat='%%', timestampformat='%%'"
)
_LIST_IN_DOCUMENT = re.compile(rb'\s*(?P<data>\{"data":\s*)?(?P<rows>\{"rows":\s*)?\[(?!\s*\])')
_HEAD_BYTES = 256
_PARQUET = b"PAR1"

Connection = duckdb.DuckDBPyConnection


class Settings(NamedTuple):
    """What the worker lets one call use."""

    memory_mb: int
    threads: int
    extension_dir: str = ""


class Source(NamedTuple):
    """A credential as the SQL that makes it usable, and the extension which that needs."""

    extension: str
    sql: str
    secrets: tuple[str, ...]


class Rows(NamedTuple):
    items: list[Any]
    columns: tuple[str, ...] = ()
    """What the table has when there are no rows to tell."""


class Job(NamedTuple):
    """One call with everything it needs."""

    database: str
    texts: tuple[str, ...]
    params: Any
    sources: tuple[Source, ...] = ()
    tables: Mapping[str, Path | Rows] = {}
    """Files of stored results, which are read where they lie, and rows."""


class StoppedError(Exception):
    """The call is not wanted any more."""


class Session:
    def __init__(self, job: Job, settings: Settings) -> None:
        self._job = job
        self._settings = settings
        self._connection: Connection | None = None
        self._is_stopped = False

    def run(self) -> dict[str, Any]:
        """Raises duckdb.Error, ToolFailedError, StoppedError."""
        with (
            tempfile.TemporaryDirectory(prefix="noetl-duckdb-") as scratch,
            self._open(Path(scratch)) as connection,
        ):
            _prepare(connection, self._job, Path(scratch))
            return self._execute(connection)

    def stop(self) -> None:
        """From another thread, again and again: an interrupt between two statements is lost."""
        self._is_stopped = True
        connection = self._connection
        if connection is not None:
            connection.interrupt()

    @contextmanager
    def _open(self, scratch: Path) -> Iterator[Connection]:
        connection = self._connection = self._connect(scratch)
        try:
            yield connection
        finally:
            self._connection = None
            connection.close()

    def _connect(self, scratch: Path) -> Connection:
        config = _config(self._settings, scratch)
        until = time.monotonic() + LOCK_SECONDS_MAX
        while True:
            try:
                return duckdb.connect(self._job.database, config=config)
            except duckdb.Error as error:
                if not is_locked(error) or time.monotonic() > until:
                    raise
            self._check()
            time.sleep(LOCK_POLL_SECONDS)

    def _execute(self, connection: Connection) -> dict[str, Any]:
        job = self._job
        statements = [s for text in job.texts for s in connection.extract_statements(text)]
        if not statements:
            raise wrong_field("command", "has no statement in it")
        # DuckDB writes to one database in a transaction, so a script that uses several has none.
        is_atomic = len(statements) > 1 and not job.sources
        is_atomic = is_atomic and not any(s.type.name in _TRANSACTION for s in statements)
        if is_atomic:
            connection.begin()
        for statement in statements:
            self._check()
            result = self._execute_one(connection, statement)
        if is_atomic:
            connection.commit()
        return result

    def _execute_one(self, connection: Connection, statement: duckdb.Statement) -> dict[str, Any]:
        connection.execute(statement, _values(statement, self._job.params))
        described = connection.description or []
        columns = [column[0] for column in described]
        if columns == ["Count"] and statement.type.name in _CHANGES:
            (count,) = connection.fetchone() or (0,)
            return {"rows": [], "row_count": count, "columns": []}
        if columns == ["Success"] and statement.type.name != "SELECT":
            return {"rows": [], "row_count": 0, "columns": []}
        is_json = [str(column[1]) == "JSON" for column in described]
        rows = list(self._rows(connection, columns, is_json))
        return {"rows": rows, "row_count": len(rows), "columns": columns}

    def _rows(
        self, connection: Connection, columns: list[str], is_json: list[bool]
    ) -> Iterator[dict[str, Any]]:
        count = 0
        while records := connection.fetchmany(ROWS_AT_ONCE):
            self._check()
            count += len(records)
            if count > ROWS_MAX:
                raise wrong_field("command", f"gave more than {ROWS_MAX} rows; add a LIMIT")
            for record in records:
                values = map(_value, record, is_json)
                yield dict(zip(columns, values, strict=True))

    def _check(self) -> None:
        if self._is_stopped:
            raise StoppedError


def _config(settings: Settings, scratch: Path) -> dict[str, Any]:
    config: dict[str, Any] = {
        "memory_limit": f"{settings.memory_mb}MiB",
        "threads": settings.threads,
        "temp_directory": str(scratch / "spill"),
        "max_temp_directory_size": SPILL_SIZE_MAX,
        # Secrets that somebody keeps in the home directory are not the playbook's.
        "secret_directory": str(scratch / "secrets"),
        "default_secret_storage": "memory",
        "autoinstall_known_extensions": False,
        # SQL must not see the variables of this process.
        "python_enable_replacements": False,
    }
    if settings.extension_dir:
        config["extension_directory"] = settings.extension_dir
    return config


def _prepare(connection: Connection, job: Job, scratch: Path) -> None:
    connection.execute("SET TimeZone = 'UTC'")
    for name, rows in job.tables.items():
        if isinstance(rows, Path):
            _view_file(connection, name, rows)
        else:
            _load_rows(connection, name, rows, scratch / "rows.json")
    for source in job.sources:
        _connect_source(connection, source)
    names = ", ".join(literal(name) for name in _OWN_SETTINGS)
    connection.execute(f"SET allowed_configs = [{names}]")
    connection.execute("SET lock_configuration = true")


def _view_file(connection: Connection, name: str, path: Path) -> None:
    reading = reading_of(path)
    assert reading is not None, path
    connection.execute(f"CREATE TEMP VIEW {identifier(name)} AS {reading}")


def reading_of(path: Path) -> str | None:
    """The SELECT that reads the rows of a stored result where it lies, if it can be."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    place = literal(str(path))
    if head.startswith(_PARQUET):
        return f"SELECT * FROM read_parquet({place})"  # noqa: S608 - a quoted literal
    found = _LIST_IN_DOCUMENT.match(head)
    if found is None:
        return None
    steps = [step for step in ("data", "rows") if found[step] is not None]
    if not steps:
        options = f"format='array', {_JSON_AS_IT_IS}"
        return f"SELECT * FROM read_json({place}, {options})"  # noqa: S608 - a quoted literal
    size_max = path.stat().st_size + 1
    options = f"format='unstructured', maximum_object_size={size_max}, {_JSON_AS_IT_IS}"
    column = f"unnest({'.'.join(steps)}, max_depth := 2)"
    return f"SELECT {column} FROM read_json({place}, {options})"  # noqa: S608 - a quoted literal


def _load_rows(connection: Connection, name: str, rows: Rows, path: Path) -> None:
    items = rows.items
    if not items:
        columns = ", ".join(
            f"NULL AS {identifier(column)}" for column in rows.columns or ("value",)
        )
        # A view: its columns have no type yet, so that they fit wherever they are used.
        connection.execute(f"CREATE TEMP VIEW {identifier(name)} AS SELECT {columns} WHERE false")
        return
    if not all(isinstance(item, dict) for item in items):
        items = [{"value": item} for item in items]
    path.write_bytes(msgspec.json.encode(items))
    connection.execute(f"CREATE TEMP TABLE {identifier(name)} AS {reading_of(path)}")
    path.unlink()


def _connect_source(connection: Connection, source: Source) -> None:
    try:
        _load_extension(connection, source.extension)
        connection.execute(source.sql)
    except duckdb.Error as error:
        # DuckDB quotes what it was given to connect with.
        told = error_of(error)
        for secret in source.secrets:
            told = msgspec.structs.replace(told, message=told.message.replace(secret, "***"))
        raise ToolFailedError(told) from None


def _load_extension(connection: Connection, name: str) -> None:
    packaged = packaged_extension(name)
    try:
        connection.load_extension(name if packaged is None else str(packaged))
    except duckdb.IOException:
        raise ToolFailedError(missing_extension(name)) from None


def packaged_extension(name: str) -> Path | None:
    """The file that the package `duckdb-extension-NAME` brings for this version of DuckDB."""
    spec = find_spec(f"duckdb_extension_{name}")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "extensions" / f"v{duckdb.__version__}"
    path = folder / f"{name}.duckdb_extension"
    return path if path.exists() else None


def _values(statement: duckdb.Statement, params: Any) -> dict[str, Any]:
    """What this statement reads of the parameters: `$name` of a mapping, `?` and `$1` of a list."""
    given = params
    if isinstance(params, list):
        given = {str(number): value for number, value in enumerate(params, 1)}
    wanted = sorted(statement.named_parameters)
    missing = [name for name in wanted if name not in given]
    if missing:
        raise wrong_field("params", f"has no value for the parameter {missing[0]!r}")
    return {name: given[name] for name in wanted}


def _value(value: Any, is_json: bool) -> Any:
    if is_json and isinstance(value, str):
        return msgspec.json.decode(value)
    return from_column(value)


def identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
