"""Brings the stack's database up to the schema of this version before any service starts."""

import asyncpg

from noetl_cli.failure import CommandFailed
from noetl_core.store.migrations import MigrationChangedError, migrate


async def apply_migrations(dsn: str) -> list[str]:
    """The names of the migrations that were missing."""
    try:
        connection = await asyncpg.connect(dsn)
    except (OSError, asyncpg.PostgresError, ValueError) as error:
        raise CommandFailed(f"cannot reach the database: {error}. Check its address.") from error
    try:
        return await migrate(connection)
    except MigrationChangedError as error:
        raise CommandFailed(str(error)) from error
    except asyncpg.PostgresError as error:
        raise CommandFailed(f"a migration failed: {error}") from error
    finally:
        await connection.close()
