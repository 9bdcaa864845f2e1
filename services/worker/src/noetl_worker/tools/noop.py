"""`noop`: does nothing. Gives its `value`, else its input: a value computed by templates alone."""

from noetl_worker.tools.tool import ToolCall, ToolResult

_NOTHING = ToolResult()


class NoopTool:
    kind = "noop"

    async def run(self, call: ToolCall) -> ToolResult:
        if "value" in call.config:
            return ToolResult(call.config["value"])
        return ToolResult(dict(call.input)) if call.input else _NOTHING

    async def close(self) -> None:
        pass
