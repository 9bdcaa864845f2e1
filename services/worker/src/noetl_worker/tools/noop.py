"""`noop`: does nothing, and gives its input back: a value computed by templates alone."""

from noetl_worker.tools.tool import ToolCall, ToolResult

_NOTHING = ToolResult()


class NoopTool:
    kind = "noop"

    async def run(self, call: ToolCall) -> ToolResult:
        return ToolResult(dict(call.input)) if call.input else _NOTHING

    async def close(self) -> None:
        pass
