"""After a commit: tell the idle workers and the projection. A lost wake-up costs their poll."""

import structlog

from noetl_broker.turn import Turn
from noetl_core.bus.connection import Bus
from noetl_core.wire.subjects import LOG_ENDED, inbox_wake, log_wake, pool_wake, worker_wake

log = structlog.get_logger()


async def dispatch(bus: Bus, turn: Turn) -> None:
    # Publish after the commit: a command announced for a transaction that rolled back would run
    # a step that never happened.
    for (shard, pool), count in turn.work.items():
        await bus.wake(pool_wake(shard, pool), b"%d" % count)
    for pool, requires in turn.nobody_able:
        log.warning("commands.nobody_able", pool=pool, requires=sorted(requires))
    for (shard, worker), count in turn.meant_for.items():
        await bus.wake(worker_wake(shard, worker), b"%d" % count)
    for shard in turn.told:
        await bus.wake(inbox_wake(shard))
    for shard in set(turn.touched.values()):
        await bus.wake(log_wake(shard), LOG_ENDED if shard in turn.ended_on else b"")
