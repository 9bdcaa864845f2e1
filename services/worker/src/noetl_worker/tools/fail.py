"""`fail`: always an error, with what the playbook says about it."""

from noetl_worker.tools.tool import ToolCall, ToolResult, failure, wrong_field

MESSAGE_DEFAULT = "the playbook says that this is a failure"
KIND_DEFAULT = "failed"


class FailTool:
    kind = "fail"

    async def run(self, call: ToolCall) -> ToolResult:
        retryable = call.config.get("retryable", False)
        if not isinstance(retryable, bool):
            raise wrong_field("retryable", f"must be true or false, not {retryable!r}")
        return failure(
            _text(call, "error_kind", KIND_DEFAULT),
            _text(call, "message", MESSAGE_DEFAULT),
            code=_text(call, "code", ""),
            retryable=retryable,
        )

    async def close(self) -> None:
        pass


def _text(call: ToolCall, field: str, default: str) -> str:
    value = call.config.get(field)
    return default if value is None else str(value)
