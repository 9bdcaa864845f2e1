"""Questions in SQL to the archives: the Parquet files that the compactor has written."""

import asyncio
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import msgspec

from noetl_cli.asynchronous import run_until_signal
from noetl_cli.failure import EXIT_USAGE, CommandFailed
from noetl_cli.stack.data_dir import DataDir, default_data_dir
from noetl_core.blob import parquet
from noetl_core.blob.archives import finished
from noetl_core.blob.away import StoreAwayError
from noetl_core.blob.place import Place
from noetl_core.process.config import ConfigError, StoreConfig, load_config
from noetl_core.process.stores import open_archives
from noetl_core.store.archive import Archive, File

CELL_CHARACTERS_MAX = 80
_WEEK = re.compile(r"[0-9]{4}w[0-9]{2}")


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


def ask(query: str, archive_dir: str, weeks: Sequence[str] = ()) -> Answer:
    """`archive_dir`: what the user names, else what the services are told, else of `noetl dev`."""
    _check_weeks(weeks)
    try:
        return run_until_signal(_ask(query, store_config(archive_dir), weeks))
    except StoreAwayError as error:
        raise CommandFailed(str(error)) from error
    except FileNotFoundError as error:
        raise CommandFailed(f"{error} is named in a manifest and is not there.") from error


def store_config(archive_dir: str) -> StoreConfig:
    environ = dict(os.environ)
    if archive_dir:
        environ["NOETL_ARCHIVE_DIR"] = archive_dir
    try:
        config = load_config(StoreConfig, environ)
    except ConfigError as error:
        raise CommandFailed(str(error), exit_code=EXIT_USAGE) from error
    if config.archives:
        return config
    return msgspec.structs.replace(config, store_dir=str(DataDir(default_data_dir()).store))


async def _ask(query: str, config: StoreConfig, weeks: Sequence[str]) -> Answer:
    async with open_archives(config) as place:
        assert place is not None, config.archives
        archives = await finished(place)
        if not archives:
            raise CommandFailed(
                f"there is no archive in {place.location}: nothing is past retention yet, the "
                "compactor is not enabled (NOETL_COMPACTOR_ENABLED), or they are elsewhere "
                "(--archive-dir)."
            )
        if weeks:
            archives = [one for one in archives if one.week in weeks]
        files = _files_for(query, archives)
        _check_room(files, place)
        async with place.at_hand(files) as paths:
            connection = _opened(files, paths)
            try:
                return await asyncio.to_thread(_answer, connection, query)
            except asyncio.CancelledError:
                connection.interrupt()
                raise


def _check_weeks(weeks: Sequence[str]) -> None:
    """One that is misspelled would look like a week without rows."""
    wrong = [week for week in weeks if _WEEK.fullmatch(week) is None]
    if wrong:
        raise CommandFailed(f"{wrong[0]!r} is no week such as 2026w07.", exit_code=EXIT_USAGE)


def _files_for(query: str, archives: Sequence[Archive]) -> list[File]:
    """Those of the tables that the question names: results are much larger than the log."""
    with parquet.connect() as connection:
        for source in parquet.COLUMNS:
            connection.execute(parquet.view_over(source, []))
        try:
            named = connection.get_table_names(query)
        except duckdb.Error:
            named = set()  # whoever answers says what is wrong with it
    return [file for one in archives for file in one.files if file.source in named]


def _check_room(files: Sequence[File], place: Place) -> None:
    needed = sum(file.bytes for file in files)
    if place.room_bytes is not None and needed > place.room_bytes:
        raise CommandFailed(
            f"this reads {needed / 1024**2:.0f} MB of {place.location}, and "
            f"NOETL_ARCHIVE_COPIES_MB allows {place.room_bytes / 1024**2:.0f} on this disk: "
            "ask for fewer weeks (--week), or allow more.",
            exit_code=EXIT_USAGE,
        )


def _opened(files: Sequence[File], paths: Sequence[Path]) -> duckdb.DuckDBPyConnection:
    connection = parquet.connect(for_a_person=True)
    connection.execute("SET allowed_paths = $1", [[str(path) for path in paths]])
    for source in parquet.COLUMNS:
        own = [path for file, path in zip(files, paths, strict=True) if file.source == source]
        connection.execute(parquet.view_over(source, own))
    # From here on it reads these files and nothing else of this machine or of the network.
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def _answer(connection: duckdb.DuckDBPyConnection, query: str) -> Answer:
    try:
        statements = connection.extract_statements(query)
        # Not even EXPLAIN: with ANALYZE it runs what it explains, a COPY over a file for one.
        if len(statements) != 1 or statements[0].type.name != "SELECT":
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
