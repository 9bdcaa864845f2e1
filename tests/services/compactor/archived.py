"""What is in archives, as anybody finds it, and what must hold when all of a log is there."""

import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb

from noetl_core.blob.place import Place
from noetl_core.store.postgres import Pool

from .old_log import rows_of, tables

DEFAULTS = {"event_default", "result_ref_default"}


async def in_files(place: Place, table: str) -> list[Any]:
    """What anybody reads who has the files and DuckDB."""
    with TemporaryDirectory() as directory:
        files: list[str] = []
        for name in await names_like(place, f"*/{table}-*.parquet"):
            files.append(_saved(directory, len(files), await place.read(name)))
        if not files:
            return []
        key = {"event": "event_id", "result_ref": "ref_id"}[table]
        query = f"SELECT * FROM read_parquet($1) ORDER BY execution_id, {key}"
        return duckdb.connect().execute(query, [files]).fetchall()


def _saved(directory: str, number: int, body: bytes) -> str:
    path = Path(directory, f"{number}.parquet")
    path.write_bytes(body)
    return str(path)


async def names_like(place: Place, pattern: str) -> list[str]:
    return fnmatch.filter(await place.names(), pattern)


def ids(rows: list[Any]) -> list[tuple[int, int]]:
    return [(row[0], row[1]) for row in rows]


async def assert_archived_once(pool: Pool, place: Place, before: dict[str, list[Any]]) -> None:
    """Every row that was there is in the files, once, and in the database no more."""
    for table, rows in before.items():
        assert ids(await in_files(place, table)) == ids(rows), table
        assert await rows_of(pool, table) == []
    assert await tables(pool) == DEFAULTS
    assert await pool.fetchval("SELECT count(*) FROM noetl.manifest WHERE kind = 'archive'") == 1
    assert await place.names("making/") == []
    assert len(await names_like(place, "*/manifest.json")) == 1
    assert {name.split("/")[0] for name in await place.names()} == {
        await pool.fetchval("SELECT meta ->> 'name' FROM noetl.manifest")
    }
