"""The spans of commands, told when they end here."""

import time

from noetl_core.domain.ids import VisitId, parse_command_id, visit_id
from noetl_core.process.traces import Spans
from noetl_core.store.command import Leased
from noetl_core.wire.messages import Done, Failed, Parked


class CommandSpans:
    def __init__(self, spans: Spans) -> None:
        self._spans = spans

    def tell(self, leased: Leased, message: Done | Failed | Parked, *, begun_ns: int) -> None:
        """`begun_ns`: when we began with it. It ends now."""
        parts = parse_command_id(leased.command_id)
        visit: VisitId = visit_id(parts.step, parts.visit)
        attributes: dict[str, str | int] = {
            "noetl.step": leased.step,
            "noetl.command_id": leased.command_id,
            "noetl.attempt": parts.attempt,
            "noetl.worker": message.worker_id,
            "noetl.outcome": _OUTCOMES[type(message)],
        }
        error = None
        if isinstance(message, Failed):
            # The kind, not the message: that may hold what a tool was given.
            error = attributes["error.type"] = message.error.kind
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
