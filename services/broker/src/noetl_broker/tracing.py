"""The spans of steps: from the event that entered a visit to the one that left it.

What was committed is noted on the way, which costs a look at each row; the spans are told by a turn
of their own. Who took a shard over does not know when the visits in it began: the log does.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import NamedTuple

from noetl_core.domain.ids import ExecutionId, VisitId
from noetl_core.domain.snowflake import minted_at_ms
from noetl_core.process.traces import NANOSECONDS_PER_MS, Spans
from noetl_core.store import event
from noetl_core.store.event import EventRow
from noetl_core.store.postgres import Pool

TELL_SECONDS = 0.5
OPEN_MAX = 100_000
LEFT_MAX = 10_000
"""More than this are not told: nobody waits for a trace."""

_ENTER = "step.enter:"
_LEAVE = "leave:"
_CUT_SHORT = frozenset({"execution.failed", "execution.cancelled"})


class Left(NamedTuple):
    """A visit that is over."""

    execution_id: ExecutionId
    visit: VisitId
    left_id: int
    how: str


class StepSpans:
    def __init__(self, pool: Pool, spans: Spans) -> None:
        self._pool = pool
        self._spans = spans
        self._entered: OrderedDict[ExecutionId, dict[VisitId, int]] = OrderedDict()
        self._left: deque[tuple[Left, int | None]] = deque(maxlen=LEFT_MAX)

    def note(self, rows: Iterable[EventRow]) -> None:
        """These rows are committed."""
        for row in rows:
            execution_id = ExecutionId(row.execution_id)
            if row.event_key.startswith(_ENTER):
                visit = VisitId(row.event_key.removeprefix(_ENTER))
                self._entered.setdefault(execution_id, {})[visit] = row.event_id
            elif row.event_key.startswith(_LEAVE):
                visit = VisitId(row.event_key.removeprefix(_LEAVE))
                self._leave(Left(execution_id, visit, row.event_id, row.event_type))
            elif row.event_type in _CUT_SHORT:
                for visit in list(self._entered.get(execution_id, ())):
                    self._leave(Left(execution_id, visit, row.event_id, row.event_type))
        while len(self._entered) > OPEN_MAX:
            self._entered.popitem(last=False)

    def _leave(self, left: Left) -> None:
        visits = self._entered.get(left.execution_id, {})
        self._left.append((left, visits.pop(left.visit, None)))
        if not visits:
            self._entered.pop(left.execution_id, None)

    async def tell(self) -> None:
        """One turn: a span for every visit that was left since the last."""
        left = [self._left.popleft() for _ in range(len(self._left))]
        unknown = [one for one, entered_id in left if entered_id is None]
        found = await event.ids_of(
            self._pool, [(one.execution_id, f"{_ENTER}{one.visit}") for one in unknown]
        )
        for one, entered_id in left:
            began = entered_id or found.get((one.execution_id, f"{_ENTER}{one.visit}"))
            if began is not None:
                self._tell(one, began)

    def _tell(self, left: Left, entered_id: int) -> None:
        step, _, visit = left.visit.rpartition(".")
        times = (minted_at_ms(entered_id), minted_at_ms(left.left_id))
        self._spans.visit(
            left.execution_id,
            left.visit,
            f"step {step}",
            (times[0] * NANOSECONDS_PER_MS, times[1] * NANOSECONDS_PER_MS),
            {"noetl.step": step, "noetl.visit": int(visit), "noetl.outcome": left.how},
            error=None if left.how in {"step.exit", "step.skipped"} else left.how,
        )
