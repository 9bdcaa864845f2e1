"""The turn of the auditor: fold a few executions again and compare them with their rows.

The projection is incremental, so a mistake in a row (a bug in a fold that was mended since, an
update by hand, a broken disk) would stay there for good. A row that differs is a bug to look into:
it is counted, logged, kept as a dead letter, and written anew from the log.
"""

import random
from collections.abc import Iterable

import structlog

from noetl_core.domain.ids import ExecutionId, ShardId
from noetl_core.store import execution_projection, refold
from noetl_core.store.postgres import Pool
from noetl_core.store.refold import Difference, LongLogError
from noetl_projection import metrics

log = structlog.get_logger()


EVENTS_MAX = 20_000
"""A longer log is left to `noetl db rebuild-projection`: folding it would take too long here."""


async def audit(pool: Pool, shards: Iterable[ShardId], *, limit: int) -> int:
    """Look at up to `limit` of the newest and as many others. Says how many were wrong."""
    place = random.random()  # noqa: S311 - any will do
    sampled = await execution_projection.sample(pool, shards, place=place, limit=limit)
    found = [d for one in sampled if (d := await _compare(pool, one)) is not None]
    await refold.heal(pool, found)
    metrics.AUDITED.add(len(sampled))
    metrics.DIFFERED.add(len(found))
    return len(found)


async def _compare(pool: Pool, execution_id: ExecutionId) -> Difference | None:
    try:
        found = await refold.compare(pool, execution_id, events_max=EVENTS_MAX)
    except LongLogError:
        return None
    if found is not None:
        log.error("projection.differs", execution_id=execution_id, columns=list(found.columns))
    return found
