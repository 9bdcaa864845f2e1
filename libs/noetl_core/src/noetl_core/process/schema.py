"""Before a service begins: the database has what this version was written for.

A migration comes before the code that needs it, and removes only what no running code uses. So a
service waits for a schema that is older than itself, and works with one that is newer.
"""

import asyncio

import structlog

from noetl_core.process.complaint import Complaint
from noetl_core.store.migration_status import fit
from noetl_core.store.postgres import Pool

LOOK_SECONDS = 1.0

log = structlog.get_logger()


async def await_schema(pool: Pool) -> None:
    """Return when every migration of this version is applied. Until then we are not ready."""
    complaint = Complaint()
    found = await fit(pool)
    while found.missing:
        if complaint.failed():
            log.warning("schema.awaited", missing=found.missing, run="noetl db migrate")
        await asyncio.sleep(LOOK_SECONDS)
        found = await fit(pool)
    if looks := complaint.recovered():
        log.info("schema.ready", looks=looks)
    if found.newer:
        log.info("schema.newer", migrations=found.newer)
