"""`approval`: waits until somebody says yes or no. The signal has the name of the step."""

from collections.abc import Mapping
from typing import Any

import msgspec

from noetl_worker.tools.tool import ToolCall, ToolParked, wrong_field
from noetl_worker.tools.wait import after

DETAILS_BYTES_MAX = 8 * 1024
"""What is asked stands in the log, and lists show it."""


class ApprovalTool:
    kind = "approval"

    async def run(self, call: ToolCall) -> ToolParked:
        details = {
            "message": _message(call.config.get("message")),
            "approvers": _approvers(call.config.get("approvers")),
            "form": _form(call.config.get("form")),
        }
        size = len(msgspec.json.encode(details))
        if size > DETAILS_BYTES_MAX:
            problem = f"and the rest of the question have {size} bytes, {DETAILS_BYTES_MAX} at most"
            raise wrong_field("message", problem)
        return ToolParked(
            signal=call.step,
            details=details,
            until_ms=None if call.timeout_s is None else after(call.timeout_s),
        )

    async def close(self) -> None:
        pass


def _message(value: Any) -> str:
    return "" if value is None else str(value)


def _approvers(value: Any) -> list[str]:
    """Who may answer; nobody named is anybody."""
    names = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise wrong_field("approvers", "must be a list of names")
    return names


def _form(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong_field("form", f"must describe its fields by name, not {type(value).__name__}")
    return dict(value)
