"""The span of an execution, told when its end is shown."""

import time
from collections.abc import Iterable
from datetime import datetime

from noetl_core.domain.snowflake import minted_at_ms
from noetl_core.domain.state import ExecutionState
from noetl_core.process.traces import NANOSECONDS_PER_MS, Spans
from noetl_core.store.execution_projection import Projected

AGE_SECONDS_MAX = 600.0
"""Not what ended longer ago: when the log is replayed, its traces were told long since."""

_ENDS = frozenset({"execution.completed", "execution.failed", "execution.cancelled"})


def tell_ended(spans: Spans, rows: Iterable[Projected]) -> None:
    for one in rows:
        ended_at = one.ended_at
        if ended_at is None or one.last_event_type not in _ENDS:
            continue  # something came after its end, which was told
        if time.time() - ended_at.timestamp() < AGE_SECONDS_MAX:
            _tell(spans, one, ended_at)


def _tell(spans: Spans, one: Projected, ended_at: datetime) -> None:
    state = one.state
    caller = None
    if state.parent_execution_id is not None and state.parent_command_id is not None:
        caller = (state.parent_execution_id, state.parent_command_id)
    spans.execution(
        state.execution_id,
        f"execution {one.path}",
        # Its id was made before its first event was committed, and no step began before it.
        (minted_at_ms(state.execution_id) * NANOSECONDS_PER_MS, _nanoseconds(ended_at)),
        {"noetl.path": one.path, "noetl.version": one.version, "noetl.status": state.status},
        error=_error(state),
        caller=caller,
    )


def _error(state: ExecutionState) -> str | None:
    if state.status == "COMPLETED":
        return None
    return state.status if state.error is None else state.error.kind


def _nanoseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1e6) * 1000
