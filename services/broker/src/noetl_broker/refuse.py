"""Reports that do not count: of a command that somebody else holds, or has ended."""

from typing import TypeGuard

import msgspec
import structlog

from noetl_broker.turn import Taken, Turn
from noetl_core.domain.ids import CommandId, ExecutionId, WorkerId
from noetl_core.store import holder
from noetl_core.store.batch import RefusalRow
from noetl_core.wire.messages import Claimed, Done, Expired, Failed, Message, Parked

log = structlog.get_logger()


async def refuse_late(turn: Turn) -> None:
    """A worker that slept through its lease: what it says of a command that was ended without
    it is refused. The same end said twice is only dropped."""
    if turn.unheeded:
        ends = [(m.execution_id, m.command_id, m.worker_id) for m in turn.unheeded]
        late = await holder.ended_by_others(turn.conn, ends)
        turn.batch.refusals += [RefusalRow(worker, e, c) for e, c, worker in late]


async def without_outdated(turn: Turn, taken: list[Taken]) -> list[Taken]:
    """What the reaper saw may be over: a worker that was cut off has renewed its leases when it
    is back, and its commands go on. Those that it gave back itself do not count as lost."""
    keys = [_key(t.message) for t in taken if isinstance(t.message, Expired)]
    if not keys:
        return taken
    standings = await holder.standings(turn.conn, keys)
    kept: list[Taken] = []
    for t in taken:
        message = t.message
        if isinstance(message, Expired):
            standing = standings.get(_key(message))
            if standing is not None and not standing.is_over:
                log.info("report.outdated", command_id=message.command_id)
                continue
            if standing is not None and standing.given_back_by is not None:
                t = t._replace(message=_given_back(message, standing.given_back_by))  # noqa: PLW2901
        kept.append(t)
    return kept


async def without_strangers(turn: Turn, taken: list[Taken]) -> list[Taken]:
    """What came in by the HTTP API counts only from the worker that holds the command.

    With our own workers we are lenient: a command that nobody holds may be one whose lease was
    lost when Postgres crashed, and its result is as good as any.
    """
    said = [t.message for t in taken if _is_outside(t.message)]
    if not said:
        return taken
    holders = await holder.holders(turn.conn, [_key(message) for message in said])
    strange: set[int] = set()
    for message in said:
        key = _key(message)
        if holders.get(key) == message.worker_id:
            continue
        strange.add(id(message))
        if isinstance(message, Claimed):
            continue
        if key in holders:
            turn.batch.refusals.append(RefusalRow(message.worker_id, *key))
        else:
            turn.unheeded.append(message)
    return [t for t in taken if id(t.message) not in strange]


async def without_refused(turn: Turn, taken: list[Taken]) -> list[Taken]:
    """A completion counts only from the worker that holds the lease."""
    ends = [t.message for t in taken if isinstance(t.message, Done | Failed | Parked)]
    holders = await holder.holders(turn.conn, [_key(message) for message in ends])
    refused: set[int] = set()
    for message in ends:
        key = _key(message)
        if holders.get(key) not in {None, message.worker_id}:
            refused.add(id(message))
            turn.batch.refusals.append(RefusalRow(message.worker_id, *key))
    return [t for t in taken if id(t.message) not in refused]


def _key(message: Claimed | Parked | Done | Failed | Expired) -> tuple[ExecutionId, CommandId]:
    return message.execution_id, message.command_id


def _is_outside(message: Message) -> TypeGuard[Claimed | Done | Failed]:
    return isinstance(message, Claimed | Done | Failed) and message.outside


def _given_back(message: Expired, worker_id: WorkerId) -> Expired:
    reason = f"worker {worker_id} has given it back"
    return msgspec.structs.replace(message, given_back=True, reason=reason)
