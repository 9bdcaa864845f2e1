"""The spans of steps: from the event that entered a visit to the one that left it. And those of
commands that were lost: whoever had them cannot tell any more.

What was committed is noted on the way, which costs a look at each row; the spans are told by a turn
of their own. Who took a shard over does not know when the visits in it began: the log does.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import NamedTuple

from noetl_core.domain.ids import (
    CommandId,
    EventId,
    ExecutionId,
    VisitId,
    parse_command_id,
    visit_id,
)
from noetl_core.domain.snowflake import minted_at_ms
from noetl_core.process.traces import NANOSECONDS_PER_MS, Spans
from noetl_core.store import event
from noetl_core.store.event import EventRow
from noetl_core.store.postgres import Pool

TELL_SECONDS = 0.5
OPEN_MAX = 100_000
LEFT_MAX = 10_000
"""More than this are not told: nobody waits for a trace."""

_CLAIM = "command.claimed:"
_END = "end:"
_ENTER = "step.enter:"
_LEAVE = "leave:"
_EXPIRED = "command.expired"
_CUT_SHORT = frozenset({"execution.failed", "execution.cancelled"})


class Left(NamedTuple):
    """A visit that is over."""

    execution_id: ExecutionId
    visit: VisitId
    left_id: int
    how: str


class Lost(NamedTuple):
    """An attempt that nobody has ended: its lease ran out."""

    execution_id: ExecutionId
    command_id: CommandId
    lost_id: int


class StepSpans:
    def __init__(self, pool: Pool, spans: Spans) -> None:
        self._pool = pool
        self._spans = spans
        self._entered: OrderedDict[ExecutionId, dict[VisitId, int]] = OrderedDict()
        self._left: deque[tuple[Left, int | None]] = deque(maxlen=LEFT_MAX)
        self._lost: deque[Lost] = deque(maxlen=LEFT_MAX)
        self._cut_short: OrderedDict[ExecutionId, tuple[EventId, str]] = OrderedDict()

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
            elif row.event_type == _EXPIRED:
                command_id = CommandId(row.event_key.removeprefix(_END))
                self._lost.append(Lost(execution_id, command_id, row.event_id))
            elif row.event_type in _CUT_SHORT:
                for visit in list(self._entered.get(execution_id, ())):
                    self._leave(Left(execution_id, visit, row.event_id, row.event_type))
                self._cut_short[execution_id] = EventId(row.event_id), row.event_type
        while len(self._entered) > OPEN_MAX:
            self._entered.popitem(last=False)
        while len(self._cut_short) > LEFT_MAX:
            self._cut_short.popitem(last=False)

    def _leave(self, left: Left) -> None:
        visits = self._entered.get(left.execution_id, {})
        self._left.append((left, visits.pop(left.visit, None)))
        if not visits:
            self._entered.pop(left.execution_id, None)

    async def tell(self) -> None:
        """One turn: a span for every visit that was left since the last, and for what was lost."""
        await self._tell_lost()
        left = [self._left.popleft() for _ in range(len(self._left))]
        left += await self._entered_elsewhere({(one.execution_id, one.visit) for one, _ in left})
        unknown = [one for one, entered_id in left if entered_id is None]
        found = await event.ids_of(
            self._pool, [(one.execution_id, f"{_ENTER}{one.visit}") for one in unknown]
        )
        for one, entered_id in left:
            began = entered_id or found.get((one.execution_id, f"{_ENTER}{one.visit}"))
            if began is not None:
                self._tell(one, began)

    async def _entered_elsewhere(
        self, told: set[tuple[ExecutionId, VisitId]]
    ) -> list[tuple[Left, int | None]]:
        """Visits that were cut short, and that somebody else has entered on our shards."""
        cut, self._cut_short = self._cut_short, OrderedDict()
        found = await event.open_visits(self._pool, {e: by for e, (by, _) in cut.items()})
        return [
            (Left(execution_id, visit, *cut[execution_id]), entered_id)
            for (execution_id, visit), entered_id in found.items()
            if (execution_id, visit) not in told
        ]

    async def _tell_lost(self) -> None:
        lost = [self._lost.popleft() for _ in range(len(self._lost))]
        claims = await event.ids_of(
            self._pool, [(one.execution_id, f"{_CLAIM}{one.command_id}") for one in lost]
        )
        for one in lost:
            # One that was never claimed was nowhere: there is no time that it took.
            claimed_id = claims.get((one.execution_id, f"{_CLAIM}{one.command_id}"))
            if claimed_id is not None:
                self._tell_command(one, claimed_id)

    def _tell_command(self, lost: Lost, claimed_id: int) -> None:
        parts = parse_command_id(lost.command_id)
        self._spans.command(
            lost.execution_id,
            visit_id(parts.step, parts.visit),
            lost.command_id,
            f"command {parts.step}",
            _times(claimed_id, lost.lost_id),
            {
                "noetl.step": parts.step,
                "noetl.command_id": lost.command_id,
                "noetl.attempt": parts.attempt,
                "noetl.outcome": "lost",
            },
            error="lost",
        )

    def _tell(self, left: Left, entered_id: int) -> None:
        step, _, visit = left.visit.rpartition(".")
        self._spans.visit(
            left.execution_id,
            left.visit,
            f"step {step}",
            _times(entered_id, left.left_id),
            {"noetl.step": step, "noetl.visit": int(visit), "noetl.outcome": left.how},
            error=None if left.how in {"step.exit", "step.skipped"} else left.how,
        )


def _times(first_id: int, last_id: int) -> tuple[int, int]:
    """When these events were made."""
    first, last = minted_at_ms(first_id), minted_at_ms(last_id)
    return first * NANOSECONDS_PER_MS, last * NANOSECONDS_PER_MS
