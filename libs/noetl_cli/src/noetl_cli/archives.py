"""Questions in SQL to the archives: the Parquet files that the compactor has written."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import msgspec

from noetl_cli.failure import EXIT_USAGE, CommandFailed
from noetl_cli.stack.data_dir import DataDir, default_data_dir
from noetl_core.blob import parquet
from noetl_core.blob.history import archive_dir_in
from noetl_core.store.archive import Archive

CELL_CHARACTERS_MAX = 80

_ASKS = ("SELECT", "EXPLAIN")


class Answer(NamedTuple):
    names: list[str]
    rows: list[tuple[Any, ...]]

    def objects(self) -> Iterator[dict[str, Any]]:
        for row in self.rows:
            yield {n: _plain(value) for n, value in zip(self.names, row, strict=True)}

    def table(self) -> str:
        cells = [self.names, *([_cell(value) for value in row] for row in self.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(self.names))]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
            for row in cells
        ]
        count = len(self.rows)
        return "\n".join([*lines, f"({count} row{'' if count == 1 else 's'})"])


def archive_directory(given: Path | None) -> Path:
    """What the user names, what the services are told, or the place of `noetl dev`."""
    if given is not None:
        return given
    store = os.environ.get("NOETL_STORE_DIR") or str(DataDir(default_data_dir()).store)
    return Path(archive_dir_in(store))


def ask(query: str, directory: Path) -> Answer:
    archives = _archives_in(directory)
    if not archives:
        raise CommandFailed(
            f"there is no archive in {directory}: nothing is past retention yet, the compactor is "
            "not enabled (NOETL_COMPACTOR_ENABLED), or they are elsewhere (--archive-dir)."
        )
    with _opened(directory, archives) as connection:
        return _answer(connection, query)


def _archives_in(directory: Path) -> list[Archive]:
    # A directory that is still being made has another name.
    found = sorted(directory.glob("*/manifest.json"))
    finished = [file for file in found if not file.parent.name.endswith(".making")]
    return [msgspec.json.decode(file.read_bytes(), type=Archive) for file in finished]


def _opened(directory: Path, archives: list[Archive]) -> duckdb.DuckDBPyConnection:
    connection = parquet.connect()
    connection.execute("SET allowed_directories = $1", [[str(directory)]])
    for source in parquet.COLUMNS:
        files = [
            directory / file.path for one in archives for file in one.files if file.source == source
        ]
        connection.execute(parquet.view_over(source, files))
    # From here on it reads the archives and nothing else of this machine or of the network.
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def _answer(connection: duckdb.DuckDBPyConnection, query: str) -> Answer:
    try:
        statements = connection.extract_statements(query)
        if len(statements) != 1 or statements[0].type.name not in _ASKS:
            raise CommandFailed(
                "one SELECT at a time: archives can only be read.", exit_code=EXIT_USAGE
            )
        cursor = connection.execute(statements[0])
        names = [column[0] for column in cursor.description or ()]
        return Answer(names, cursor.fetchall())
    except duckdb.Error as error:
        raise CommandFailed(str(error), exit_code=EXIT_USAGE) from error


def _plain(value: Any) -> Any:
    """What JSON can say: bytes as text where they are text."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value.hex()
    return value


def _cell(value: Any) -> str:
    text = "" if value is None else str(_plain(value))
    short = text if len(text) <= CELL_CHARACTERS_MAX else text[: CELL_CHARACTERS_MAX - 1] + "…"
    return short.replace("\n", "\\n")
