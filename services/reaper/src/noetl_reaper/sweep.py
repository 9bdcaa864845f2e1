"""The turns of the reaper: see what stands still, tell the broker. It never writes the log.

A report is a question to the broker, not an order: whoever was reported may have moved on by now,
and a report that comes twice, or late, changes nothing. So a lost one costs `repeat_seconds`.
"""

from collections.abc import Sequence

import structlog

from noetl_core.bus.connection import Bus
from noetl_core.domain.ids import ExecutionId, ShardId
from noetl_core.domain.sharding import shard_of
from noetl_core.domain.waiting import moment
from noetl_core.store import command, inbox, setting, stuck, timer
from noetl_core.store.command import CommandKey, ExpiredLease
from noetl_core.store.postgres import Pool, clock_of
from noetl_core.store.stuck import Stuck
from noetl_core.store.timer import DueTimer
from noetl_core.wire.messages import Due, Expired, Message, Reconcile, encode_messages
from noetl_core.wire.subjects import event_batch, inbox_wake
from noetl_reaper import metrics
from noetl_reaper.lost import LostCommands
from noetl_reaper.patience import Patience
from noetl_reaper.reported import FOUND_MAX, Reported

LOGGED_MAX = 20

log = structlog.get_logger()


async def sweep_leases(
    pool: Pool,
    bus: Bus,
    reported: Reported[CommandKey],
    patience: Patience,
    *,
    grace_seconds: float,
    limit: int,
) -> int:
    """One turn: report attempts whose worker fell silent. Says how many."""
    found = await command.expired(pool, limit=FOUND_MAX, grace_seconds=grace_seconds)
    if not patience.looked(await clock_of(pool)):
        return 0
    leases = {(one.execution_id, one.command_id): one for one in found}
    keys = reported.unsaid(leases)[:limit]
    await _report(pool, bus, "expired", [_expired(leases[key]) for key in keys])
    reported.add(keys)
    return len(keys)


async def stand_by(pool: Pool, patience: Patience) -> None:
    """The turn of one that does not lead: when it comes to, it knows how the database was."""
    await command.expired(pool, limit=1)
    patience.looked(await clock_of(pool))


async def sweep_executions(
    pool: Pool, bus: Bus, reported: Reported[ExecutionId], *, idle_seconds: float, limit: int
) -> int:
    """One turn: report executions that nothing can move any more. Says how many."""
    found = await stuck.idle_executions(pool, idle_seconds=idle_seconds, limit=FOUND_MAX)
    idle = reported.unsaid(found)[:limit]
    await _report(pool, bus, "idle", [Reconcile(execution_id=one) for one in idle])
    reported.add(idle)
    return len(idle)


async def sweep_queue(
    pool: Pool,
    bus: Bus,
    reported: Reported[ExecutionId],
    lost: LostCommands,
    *,
    leads: bool,
    limit: int,
) -> int:
    """One turn: report executions of which commands are not in the queue. Says how many."""
    if not leads:
        return 0
    found = reported.unsaid(await lost.look(pool))[:limit]
    await _report(pool, bus, "lost", [Reconcile(execution_id=one) for one in found])
    reported.add(found)
    return len(found)


async def flag_stuck(pool: Pool, *, stuck_seconds: float, limit: int) -> int:
    """One turn: flag what the broker was told of in vain, and unflag what moved. Says how many."""
    moved = await stuck.unflag_moved(pool)
    if moved:
        log.info("reaper.unflagged", execution_ids=moved[:LOGGED_MAX], count=len(moved))
    found = await stuck.stuck_executions(pool, stuck_seconds=stuck_seconds, limit=limit)
    for one in found:
        body = encode_messages([Reconcile(execution_id=one.execution_id)])
        await stuck.flag(pool, one, body=body, reason=_why_stuck(one))
        log.warning("reaper.flagged", execution_id=one.execution_id, waiting_on=one.waiting_on)
    metrics.show_dead_letters(await stuck.dead_letter_counts(pool))
    return len(found)


def _why_stuck(one: Stuck) -> str:
    stands = "" if one.waiting_on is None else f"; where it stands: {one.waiting_on}"
    return f"since {moment(one.updated_at)} no command, message or timer of it is under way{stands}"


async def sweep_timers(pool: Pool, bus: Bus, reported: Reported[DueTimer], *, limit: int) -> int:
    """One turn: report timers that have run out. Says how many."""
    due = reported.unsaid(await timer.due(pool, limit=FOUND_MAX))[:limit]
    reports = [Due(execution_id=one.execution_id, timer=one.timer) for one in due]
    await _report(pool, bus, "due", reports)
    reported.add(due)
    return len(due)


def _expired(one: ExpiredLease) -> Expired:
    reason = f"the lease of worker {one.worker_id} ran out {one.overdue_seconds:.1f} s ago"
    return Expired(execution_id=one.execution_id, command_id=one.command_id, reason=reason)


async def _report(
    pool: Pool, bus: Bus, kind: str, messages: Sequence[Expired | Reconcile | Due]
) -> None:
    if not messages:
        return
    # By the shard count of this moment: a row may be older than the last change of it.
    shard_count = await setting.shard_count(pool)
    by_shard: dict[ShardId, list[Message]] = {}
    for message in messages:
        shard = shard_of(message.execution_id, shard_count=shard_count)
        by_shard.setdefault(shard, []).append(message)
    for shard, own in by_shard.items():
        road = await _send(pool, bus, shard, encode_messages(own))
        metrics.REPORTS.add(len(own), {"kind": kind, "road": road})
        log.info("reaper.reported", kind=kind, shard_id=shard, count=len(own), road=road)


async def _send(pool: Pool, bus: Bus, shard: ShardId, body: bytes) -> str:
    if await bus.publish(event_batch(shard), body):
        return "nats"
    await inbox.put(pool, shard, body)
    await bus.wake(inbox_wake(shard))
    return "inbox"
