"""The turn of the auditor: fold a few executions again and compare them with their rows.

The projection is incremental, so a mistake in a row (a bug in a fold that was mended since, an
update by hand, a broken disk) would stay there for good. A row that differs is a bug to look into:
it is counted, logged, kept as a dead letter, and written anew from the log.
"""

import random
from collections.abc import Collection

import structlog

from noetl_core.domain.ids import ExecutionId, ShardId
from noetl_core.store import execution_projection, refold
from noetl_core.store.postgres import Pool
from noetl_core.store.refold import Difference, LongLogError
from noetl_projection import metrics

log = structlog.get_logger()


EVENTS_MAX = 20_000
"""A longer log is left to `noetl db rebuild-projection`: folding it would take too long here."""


class Round:
    """Goes through all that is in the log, look by look. It begins anywhere: who is started anew
    often must not look at the same ones again and again."""

    def __init__(self, after: ExecutionId | None = None) -> None:
        self.after = after


async def audit(
    pool: Pool, shards: Collection[ShardId], *, limit: int, at: Round | None = None
) -> int:
    """Look at up to `limit` of the newest and at the next ones. Says how many were wrong."""
    at = at or Round()
    if at.after is None:
        place = random.random()  # noqa: S311 - any will do
        at.after = await execution_projection.somewhere(pool, place)
    sampled = await execution_projection.sample(pool, shards, after=at.after, limit=limit)
    at.after = sampled.upto
    found = [d for one in sampled.executions if (d := await _compare(pool, one)) is not None]
    await refold.heal(pool, found)
    metrics.AUDITED.add(len(sampled.executions))
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
