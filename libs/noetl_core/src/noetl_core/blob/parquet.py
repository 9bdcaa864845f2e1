"""Rows of the log in Parquet files: written from CSV, read back byte for byte, and asked with SQL.

Everything blocks: call it in a thread. The files are plain Parquet; any other program reads them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import duckdb

from noetl_core.blob.durable import digest
from noetl_core.domain.errors import NoetlError
from noetl_core.store.archive import NULL, Key, Source

ROW_GROUP_ROWS = 20_000
"""A reader of one execution decodes one or two of these: rows are in the order of their keys."""
LINE_BYTES_MAX = 48 * 1024 * 1024
"""The largest inline result, as hexadecimal digits, with room."""
_MEMORY = "384MB"
"""What DuckDB may take. Rows on their way through it and this process come on top: all of it fits
the 512 MiB of a pod, for files of the size that the compactor makes."""
_MEMORY_OF_A_PERSON = "2GB"

_INTEGER, _LONG, _TEXT, _MOMENT, _BYTES = "INTEGER", "BIGINT", "VARCHAR", "TIMESTAMP", "BLOB"

COLUMNS: dict[Source, dict[str, str]] = {
    "event": {
        "execution_id": _LONG,
        "event_id": _LONG,
        "event_key": _TEXT,
        "shard_id": _INTEGER,
        "event_type": _TEXT,
        "status": _TEXT,
        "node_name": _TEXT,
        "command_id": _TEXT,
        "loop_id": _LONG,
        "iter_index": _INTEGER,
        "attempt": _INTEGER,
        "parent_event_id": _LONG,
        "parent_execution_id": _LONG,
        "catalog_id": _LONG,
        "epoch_id": _LONG,
        "context": _TEXT,
        "result": _TEXT,
        "meta": _TEXT,
        "error": _TEXT,
        "created_at": _MOMENT,
    },
    "result_ref": {
        "execution_id": _LONG,
        "ref_id": _LONG,
        "parent_ref_id": _LONG,
        "step": _TEXT,
        "store_tier": _TEXT,
        "physical_uri": _TEXT,
        "media_type": _TEXT,
        "bytes": _LONG,
        "sha256": _BYTES,
        "inline": _BYTES,
        "preview": _TEXT,
        "expires_at": _MOMENT,
        "created_at": _MOMENT,
        "removed_at": _MOMENT,
    },
}
"""The columns in the order in which `store.archive.copy_rows` gives them."""

ROW_ID: dict[Source, str] = {"event": "event_id", "result_ref": "ref_id"}
_SHARDS: dict[Source, str] = {"event": "histogram(shard_id)", "result_ref": "NULL"}


class ArchiveDamagedError(NoetlError):
    """A file is not what was written, or not what the log holds: nothing may be dropped for it."""


class Written(NamedTuple):
    rows: int
    bytes: int
    sha256: str
    lower: int
    upper: int
    last: Key
    shards: dict[int, int]
    """How many rows of each shard, where rows have one."""


def connect(*, for_a_person: bool = False) -> duckdb.DuckDBPyConnection:
    """One that reads and writes files, and nothing else: it cannot download or load anything.

    `for_a_person`: it has the machine for itself, and any question may come.
    """
    settings: dict[str, Any] = {
        "memory_limit": _MEMORY_OF_A_PERSON,
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    if not for_a_person:
        # Each thread has vectors of rows of its own, and one row may be megabytes.
        settings |= {"memory_limit": _MEMORY, "threads": 1}
    connection = duckdb.connect(":memory:", config=settings)
    connection.execute("SET parquet_metadata_cache = true")
    return connection


def write(connection: duckdb.DuckDBPyConnection, source: Source, csv: Path, target: Path) -> None:
    """Make a Parquet file of the rows."""
    columns = COLUMNS[source]
    names = ", ".join(_decoded(name, kind) for name, kind in columns.items())
    as_read = {n: _TEXT if kind == _BYTES else kind for n, kind in columns.items()}
    connection.execute(
        f"""
        COPY (
            SELECT {names} FROM read_csv(
                $csv, columns = {as_read}, header = false, auto_detect = false, delim = ',',
                quote = '"', escape = '"', nullstr = '{NULL}', allow_quoted_nulls = false,
                new_line = '\\n', max_line_size = {_line_bytes(csv)},
                buffer_size = {_line_bytes(csv)}
            )
        )
        TO '{_quoted(target)}'
        (FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {ROW_GROUP_ROWS})
        """,  # noqa: S608 - names of this module; the paths are quoted
        {"csv": str(csv)},
    )


def read_back(
    connection: duckdb.DuckDBPyConnection, source: Source, csv: Path, target: Path, *, rows: int
) -> Written:
    """Read the file again, spell its rows as the database did, and compare every byte of them."""
    again = csv.with_suffix(".again")
    names = ", ".join(_encoded(name, kind) for name, kind in COLUMNS[source].items())
    connection.execute(
        f"""
        COPY (SELECT {names} FROM read_parquet($file))
        TO '{_quoted(again)}' (
            FORMAT csv, HEADER false, DELIMITER ',', QUOTE '"', ESCAPE '"', NULLSTR '{NULL}',
            FORCE_QUOTE *
        )
        """,  # noqa: S608 - names of this module; the path is quoted
        {"file": str(target)},
    )
    if digest(again) != digest(csv):
        raise ArchiveDamagedError(f"{target.name} does not give back what the database holds")
    again.unlink()
    summary = connection.execute(
        f"""
        SELECT count(*), min(execution_id), max(execution_id),
               max((execution_id, {ROW_ID[source]})), {_SHARDS[source]}
        FROM read_parquet($file)
        """,  # noqa: S608 - a name of this module
        {"file": str(target)},
    ).fetchone()
    assert summary is not None
    if summary[0] != rows:
        raise ArchiveDamagedError(f"{target.name} holds {summary[0]} rows instead of {rows}")
    last = Key(*(summary[3].values() if isinstance(summary[3], dict) else summary[3]))
    size, sha256 = target.stat().st_size, digest(target)
    return Written(rows, size, sha256, summary[1], summary[2], last, summary[4] or {})


def ask(
    connection: duckdb.DuckDBPyConnection, query: str, files: Sequence[Path], **values: Any
) -> list[dict[str, Any]]:
    """Rows as dictionaries; `$files` in the query are the files."""
    cursor = connection.cursor()
    try:
        cursor.execute(query, {"files": [str(file) for file in files], **values})
        names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    finally:
        cursor.close()


def view_over(source: Source, files: Sequence[Path]) -> str:
    """SQL that makes a table of the files, for people to ask."""
    paths = ", ".join(f"'{_quoted(file)}'" for file in files)
    if not paths:
        columns = ", ".join(f"{name} {kind}" for name, kind in COLUMNS[source].items())
        return f"CREATE TABLE {source} ({columns})"
    return f"CREATE VIEW {source} AS SELECT * FROM read_parquet([{paths}])"  # noqa: S608 - quoted


def _decoded(name: str, kind: str) -> str:
    return f"unhex({name}) AS {name}" if kind == _BYTES else name


def _encoded(name: str, kind: str) -> str:
    return f"lower(hex({name})) AS {name}" if kind == _BYTES else name


def _line_bytes(csv: Path) -> int:
    # A buffer holds the longest line at least. Small files need no large one.
    return min(max(csv.stat().st_size + 1, 1024 * 1024), LINE_BYTES_MAX)


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")
