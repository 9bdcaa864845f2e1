"""The spans of commands, told when they end here."""

import time

from noetl_core.domain.ids import VisitId, WorkerId, parse_command_id, visit_id
from noetl_core.process.traces import Spans
from noetl_core.store.command import Leased
from noetl_core.wire.messages import Done, Failed, Parked


class CommandSpans:
    def __init__(self, spans: Spans) -> None:
        self._spans = spans

    def tell(self, leased: Leased, message: Done | Failed | Parked, *, begun_ns: int) -> None:
        """`begun_ns`: when we began with it. It ends now."""
        # The kind, not the message: that may hold what a tool was given.
        error = message.error.kind if isinstance(message, Failed) else None
        self._tell(leased, message.worker_id, _OUTCOMES[type(message)], begun_ns, error)

    def stopped(self, leased: Leased, worker_id: WorkerId, *, begun_ns: int) -> None:
        """Nobody wants what it would have given: its execution was cancelled, most often."""
        self._tell(leased, worker_id, "stopped", begun_ns, None)

    def _tell(
        self, leased: Leased, worker_id: str, outcome: str, begun_ns: int, error: str | None
    ) -> None:
        parts = parse_command_id(leased.command_id)
        visit: VisitId = visit_id(parts.step, parts.visit)
        attributes: dict[str, str | int] = {
            "noetl.step": leased.step,
            "noetl.command_id": leased.command_id,
            "noetl.attempt": parts.attempt,
            "noetl.worker": worker_id,
            "noetl.outcome": outcome,
        }
        if error is not None:
            attributes["error.type"] = error
        self._spans.command(
            leased.execution_id,
            visit,
            leased.command_id,
            f"command {leased.step}",
            (begun_ns, time.time_ns()),
            attributes,
            error=error,
        )


_OUTCOMES: dict[type, str] = {Done: "done", Failed: "failed", Parked: "parked"}
