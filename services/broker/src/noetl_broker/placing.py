"""Who may take a command, and who is told of it.

The workers are read every few seconds and kept in memory: which of them a key belongs to is decided
from that, recorded in `command.issued`, and a wrong guess costs the time that the target had.
"""

from noetl_broker.states import Live
from noetl_broker.turn import Turn
from noetl_core.domain.events import CommandIssued
from noetl_core.domain.ids import ShardId
from noetl_core.domain.placement import nearest_worker, requires_of
from noetl_core.domain.playbook import Playbook
from noetl_core.domain.workers import NOBODY, Workers
from noetl_core.store import runtime
from noetl_core.store.batch import PlacementRow
from noetl_core.store.postgres import Pool

WATCH_SECONDS = 2.0


class WorkerWatch:
    """The workers that lived when we last looked."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.seen: Workers = NOBODY

    async def look(self) -> None:
        self.seen = Workers(await runtime.live_workers(self._pool))


def place(turn: Turn, shard: ShardId, playbook: Playbook, live: Live, fact: CommandIssued) -> None:
    """A command that anyone can take has no row of this kind, which is nearly every command."""
    workers = live.known.workers
    requires = requires_of(playbook, fact.step, workers)
    if requires or fact.target_worker is not None:
        turn.batch.placements.append(
            PlacementRow(
                live.state.execution_id,
                fact.command_id,
                fact.target_worker,
                fact.target_s,
                "\n".join(sorted(requires)),
            )
        )
    if live.state.status != "PAUSED" and not fact.delay_s:
        _announce(turn, shard, workers, fact, requires)


def _announce(
    turn: Turn, shard: ShardId, workers: Workers, fact: CommandIssued, requires: frozenset[str]
) -> None:
    if fact.target_worker is not None:
        turn.meant_for[shard, fact.target_worker] += 1
        return
    if not requires:
        turn.work[shard, fact.pool] += 1
        return
    # The pool's wake-up is heard by one of its workers, maybe by one that lacks what is required.
    able = nearest_worker(fact.command_id, workers.able(fact.pool, requires))
    if able is None:
        turn.nobody_able.add((fact.pool, requires))
        turn.work[shard, fact.pool] += 1
    else:
        turn.meant_for[shard, able] += 1
