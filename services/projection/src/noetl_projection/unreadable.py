"""Rows of noetl.execution as a turn goes on from them, also where one of them cannot be read.

A row is made of the log, so one that is broken (an update by hand, an older version, a bad disk) or
gone is made of it again: up to the first event that the turn has read, because everything before it
is projected. Where that is not possible either, the execution is left out, and its row as it is.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import structlog

from noetl_core.domain.ids import EventId, ExecutionId, ShardId
from noetl_core.store import execution_projection
from noetl_core.store.execution_projection import Loaded, Parked, Projected, Unreadable
from noetl_core.store.postgres import Connection
from noetl_core.store.refold import LongLogError, refold
from noetl_projection import metrics
from noetl_projection.memory import Memory

EVENTS_MAX = 100_000
"""A longer log is left to `noetl db rebuild-projection`: all our shards wait while it is folded."""

_BEGINNING = "execution.started"

log = structlog.get_logger()


async def load_rows(
    conn: Connection, memory: Memory, execution_ids: Iterable[ExecutionId], read: Iterable[Any]
) -> tuple[dict[ExecutionId, Projected], list[Parked]]:
    """The rows of these executions. What cannot be had in any way is parked and given up."""
    wanted = set(execution_ids)
    loaded = await execution_projection.load(conn, wanted)
    # The first of each: the last one that is put in wins.
    firsts = {ExecutionId(row["execution_id"]): row for row in reversed(list(read))}
    parked: list[Parked] = []
    for execution_id, broken in (loaded.unreadable | _gone(loaded, wanted, firsts)).items():
        made = await _made_anew(conn, firsts[execution_id], broken)
        if isinstance(made, Parked):
            memory.given_up[execution_id] = made.shard_id
            parked.append(made)
        elif made is not None:
            loaded.rows[execution_id] = made
    return loaded.rows, parked


def _gone(
    loaded: Loaded, wanted: Iterable[ExecutionId], firsts: Mapping[ExecutionId, Any]
) -> dict[ExecutionId, Unreadable]:
    """Who has no row and does not begin with what was read."""
    missing = set(wanted) - loaded.rows.keys() - loaded.unreadable.keys()
    begun = (e for e in missing if firsts[e]["event_type"] != _BEGINNING)
    return dict.fromkeys(begun, Unreadable(b"", "the execution has no row"))


async def _made_anew(conn: Connection, first: Any, broken: Unreadable) -> Projected | Parked | None:
    """None when the execution only begins with what was read, or its beginning was parked."""
    execution_id = ExecutionId(first["execution_id"])
    reason = broken.reason
    try:
        upto = EventId(first["event_id"] - 1)
        row = await refold(conn, execution_id, upto=upto, events_max=EVENTS_MAX)
        is_whole = row is not None or not broken.state or first["event_type"] == _BEGINNING
        reason += "" if is_whole else "; its events are not in the log any more"
    except LongLogError as error:
        row, is_whole = None, False
        reason += f"; {error}: run `noetl db rebuild-projection --execution {execution_id}`"
    outcome = "refolded" if is_whole else "given_up"
    metrics.UNREADABLE.add(1, {"outcome": outcome})
    log.error("projection.unreadable", execution_id=execution_id, outcome=outcome, error=reason)
    if is_whole:
        return row
    return Parked(ShardId(first["shard_id"]), execution_id, broken.state, reason)
