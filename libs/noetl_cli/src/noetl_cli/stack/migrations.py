"""Brings a database up to the schema of this version, and says how far one is."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg

from noetl_cli.failure import CommandFailed
from noetl_cli.terminal import say
from noetl_core.domain.errors import NoetlError
from noetl_core.store.migration_locks import Patience
from noetl_core.store.migration_status import MigrationState, status
from noetl_core.store.migrations import Progress, Tell, migrate
from noetl_core.store.postgres import Connection


def tell_waiting(progress: Progress) -> None:
    """Only what somebody who waits for the end of it should know."""
    if progress.is_waiting:
        tell_all(progress)


def tell_all(progress: Progress) -> None:
    say(f"{progress.name}: {progress.text}" if progress.name else progress.text)


async def apply_migrations(
    dsn: str,
    *,
    directory: Path | None = None,
    tell: Tell = tell_waiting,
    patience: Patience | None = None,
) -> list[str]:
    """The names of the migrations that were missing."""
    async with _connection(dsn) as conn:
        return await migrate(conn, directory=directory, tell=tell, patience=patience)


async def migration_states(dsn: str, *, directory: Path | None = None) -> list[MigrationState]:
    async with _connection(dsn) as conn:
        return await status(conn, directory=directory)


@asynccontextmanager
async def _connection(dsn: str) -> AsyncIterator[Connection]:
    try:
        connection = await asyncpg.connect(dsn, server_settings={"application_name": "noetl db"})
    except (OSError, asyncpg.PostgresError, ValueError) as error:
        raise CommandFailed(f"cannot reach the database: {error}. Check its address.") from error
    try:
        yield connection
    except NoetlError as error:
        raise CommandFailed(str(error)) from error
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise CommandFailed(
            f"the database refused or went away: {error}. What was not finished is begun again by"
            " the next run."
        ) from error
    finally:
        await connection.close()
