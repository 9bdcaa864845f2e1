"""Which migrations a database has, and whether that is what this version was written for."""

from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple

import asyncpg

from noetl_core.store.migration_file import Migration, migrations_directory, read_migrations
from noetl_core.store.postgres import Connection, Pool

_APPLIED = "SELECT name, sha256, applied_at FROM noetl.schema_migration"

_DONE = "SELECT name FROM noetl.schema_migration_statement"

Standing = Literal["applied", "open", "begun", "changed", "newer"]


class MigrationState(NamedTuple):
    """`newer` is one that the database has and this version does not know."""

    name: str
    standing: Standing
    applied_at: datetime | None = None
    statements: int = 0
    statements_done: int = 0


async def status(conn: Connection | Pool, *, directory: Path | None = None) -> list[MigrationState]:
    """Every migration that is known to this version or to the database, in order."""
    known = {m.name: m for m in read_migrations(directory or migrations_directory())}
    applied = {row["name"]: row for row in await _read(conn, "schema_migration", _APPLIED)}
    begun = Counter(row["name"] for row in await _read(conn, "schema_migration_statement", _DONE))
    return [
        MigrationState(
            name,
            _standing(known.get(name), applied.get(name), is_begun=name in begun),
            applied_at=applied[name]["applied_at"] if name in applied else None,
            statements=len(known[name].statements) if name in known else 0,
            statements_done=begun[name],
        )
        for name in sorted(known.keys() | applied.keys())
    ]


def _standing(
    migration: Migration | None, row: "asyncpg.Record | None", *, is_begun: bool
) -> Standing:
    if row is None:
        return "begun" if is_begun else "open"
    if migration is None:
        return "newer"
    return "applied" if row["sha256"] == migration.sha256 else "changed"


_IS_THERE = "SELECT to_regclass('noetl.' || $1) IS NOT NULL"


async def _read(conn: Connection | Pool, table: str, query: str) -> "list[asyncpg.Record]":
    """Nothing, where nobody has migrated yet."""
    return list(await conn.fetch(query)) if await conn.fetchval(_IS_THERE, table) else []


class Fit(NamedTuple):
    """How a database fits this version: what it lacks, and what only a newer version knows of."""

    missing: list[str]
    newer: list[str]


async def fit(conn: Connection | Pool, *, directory: Path | None = None) -> Fit:
    names = {file.name for file in (directory or migrations_directory()).glob("*.sql")}
    try:
        applied = {row["name"] for row in await conn.fetch(_APPLIED)}
    except (
        asyncpg.UndefinedTableError,
        asyncpg.InvalidSchemaNameError,
        asyncpg.InsufficientPrivilegeError,
    ):
        # There is no schema yet, or one from before services read this.
        applied = set()
    return Fit(missing=sorted(names - applied), newer=sorted(applied - names))
