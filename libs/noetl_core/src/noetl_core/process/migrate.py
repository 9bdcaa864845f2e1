"""`noetl-migrate`: what `noetl db migrate` does, where only a service is installed.

Every image of a service has the migrations of its version, and this. A Job of Kubernetes runs it
before the services of that version are started (deploy/helm/noetl/templates/migrate.yaml).
"""

import asyncio
import sys

import asyncpg
import structlog

from noetl_core.domain.errors import NoetlError
from noetl_core.process.config import Config, load_or_exit
from noetl_core.process.log import set_up_logs
from noetl_core.store.migrations import Progress, migrate

log = structlog.get_logger()


def main() -> None:
    config = load_or_exit(Config)
    set_up_logs(level=config.log_level, log_format=config.log_format)
    try:
        applied = asyncio.run(_migrate(config.postgres_dsn))
    except (NoetlError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        log.error("schema.not_migrated", error=str(error))  # noqa: TRY400 - it is told, not debugged
        sys.exit(1)
    log.info("schema.migrated", applied=applied)


async def _migrate(dsn: str) -> list[str]:
    conn = await asyncpg.connect(dsn, server_settings={"application_name": "noetl-migrate"})
    try:
        return await migrate(conn, tell=_tell)
    finally:
        await conn.close()


def _tell(progress: Progress) -> None:
    log.info("migration.progress", migration=progress.name, text=progress.text)
