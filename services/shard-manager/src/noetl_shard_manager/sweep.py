"""The sweeper: who has not been heard of is offline, what nobody needs any more is forgotten, and
what the workers said last is written down where it can be asked for.
"""

import math
import time
from collections.abc import Callable

import structlog

from noetl_core.process.clock import lease_clock
from noetl_core.store import metric, topology
from noetl_core.store.metric import Sample
from noetl_core.store.postgres import Pool, clock_of
from noetl_core.wire.topology import RuntimeMember

METRICS_FORGOTTEN_MAX = 10_000
"""In one turn, so that a long absence is caught up with in steps."""

log = structlog.get_logger()


class Hearing:
    """For how long everybody who lives could be heard.

    While the database is away, or stands still, nobody can send a heartbeat, and when it is back
    all have been silent for as long as that. So after a look that came late, because those before
    it failed or hung, or because we ourselves were suspended, silence counts from then on.
    """

    def __init__(self, *, late_seconds: float, clock: Callable[[], float] = lease_clock) -> None:
        self._late_seconds = late_seconds
        self._clock = clock
        self._looked_at = clock()
        self._since = -math.inf

    async def look(self, pool: Pool) -> float:
        """Also for one that does not lead: when it comes to, it knows how the database was."""
        await clock_of(pool)
        now = self._clock()
        if now - self._looked_at > self._late_seconds:
            self._since = now
        self._looked_at = now
        return now - self._since


async def sweep(
    pool: Pool, *, offline_seconds: float, forget_seconds: float, heard_seconds: float = math.inf
) -> float:
    """One turn over noetl.runtime. Says how many milliseconds it took."""
    begun = time.perf_counter()
    silent = await topology.mark_stale(
        pool, silent_seconds=offline_seconds, heard_seconds=heard_seconds
    )
    _tell("runtime.offline", silent)
    _tell("runtime.forgotten", await topology.forget_offline(pool, silent_seconds=forget_seconds))
    return (time.perf_counter() - begun) * 1000


async def measure(
    pool: Pool, *, name: str, keep_seconds: float, sweep_ms: float | None = None
) -> bool:
    """One turn over noetl.metric. True while there is more to forget.

    `sweep_ms` is how long the last sweep took, if there was one.
    """
    await metric.observe(pool)
    forgotten = await metric.forget(pool, older_seconds=keep_seconds, limit=METRICS_FORGOTTEN_MAX)
    taken = [] if sweep_ms is None else [Sample("noetl_sweep_ms", sweep_ms)]
    await metric.report(pool, taken, kind="shard-manager", component=name)
    return forgotten == METRICS_FORGOTTEN_MAX


def _tell(what: str, members: list[RuntimeMember]) -> None:
    for member in members:
        log.info(what, kind=member.kind, name=member.name)
