"""The turn of the compactor: the partitions of the coming weeks are there before their rows are.

A week whose first rows are in the DEFAULT partition already (nobody made its partition in time)
stays there: they are found, projected and replayed as well as any others, and moving them would
lock the log while they move. The weeks after it get their partitions as usual.
"""

from collections import Counter

import structlog

from noetl_compactor import metrics
from noetl_core.domain.partitions import Partition, partitions_ahead
from noetl_core.store import partition
from noetl_core.store.partition import Ensured
from noetl_core.store.postgres import Pool

PARTITIONS_MAX = 104
"""Two years. Of more somebody should know: docs/adr/0003-partition-by-execution-id.md."""

log = structlog.get_logger()


class Told:
    """What was said already: a week that stays in the DEFAULT partition is worth one line, and so
    are too many of them."""

    def __init__(self) -> None:
        self._said: dict[str, Ensured] = {}
        self.has_many = False

    def is_news(self, one: Partition, outcome: Ensured) -> bool:
        news = outcome != "exists" and self._said.get(one.name) != outcome
        self._said[one.name] = outcome
        return news


async def compact(pool: Pool, told: Told, *, now_ms: int, weeks_ahead: int) -> Counter[Ensured]:
    """One turn: make what is missing. Says how many partitions came out how."""
    outcomes: Counter[Ensured] = Counter()
    for one in partitions_ahead(now_ms=now_ms, weeks=weeks_ahead):
        outcome = await partition.ensure(pool, one)
        outcomes[outcome] += 1
        if told.is_news(one, outcome):
            log.info("partition.ensured", partition=one.name, outcome=outcome)
    metrics.PARTITIONS_CREATED.add(outcomes["created"])
    metrics.show_missing({"occupied": outcomes["occupied"], "busy": outcomes["busy"]})
    await _count(pool, told)
    return outcomes


async def _count(pool: Pool, told: Told) -> None:
    count = await partition.count(pool)
    metrics.show_partitions(count)
    has_many = count > PARTITIONS_MAX
    if has_many and not told.has_many:
        log.warning("partition.many", count=count, advice="set NOETL_COMPACTOR_ENABLED=true")
    told.has_many = has_many
