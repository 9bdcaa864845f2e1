"""`python`: runs code in a warm child process, away from the worker's memory and secrets."""

from typing import Any

import msgspec

from noetl_core.domain.errors import ToolError
from noetl_core.domain.result_view import plain
from noetl_worker.children.pool import ChildDiedError, ChildPool
from noetl_worker.tools.tool import ToolCall, ToolResult, failure, wrong_field

_decode = msgspec.json.Decoder().decode


class PythonTool:
    kind = "python"

    def __init__(self, children: ChildPool) -> None:
        self._children = children

    async def run(self, call: ToolCall) -> ToolResult:
        request = {
            "code": _code(call),
            "names": plain(dict(call.names)),
            "input": plain(dict(call.input)),
            "libs": call.config.get("libs"),
        }
        try:
            answer = await self._children.call(request)
        except ChildDiedError as error:
            return failure(
                "process_died", f"the process that ran the code is gone: {error}", retryable=True
            )
        except (TypeError, OverflowError, msgspec.MsgspecError) as error:
            raise wrong_field("input", f"cannot be handed over: {error}") from error
        meta = {name: answer[name] for name in ("stdout", "stderr") if answer[name]}
        if "error" in answer:
            return ToolResult(error=_error_of(answer["error"]), meta=meta)
        return ToolResult(_decode(answer["value"]), meta=meta)

    async def close(self) -> None:
        await self._children.close()


def _code(call: ToolCall) -> str:
    code = call.config.get("code", call.config.get("script"))
    if not isinstance(code, str):
        raise wrong_field("code", "must be text")
    return code


def _error_of(answer: dict[str, Any]) -> ToolError:
    if answer["exception"] == "UserError":
        return ToolError(kind="client_error", code="WRONG_CODE", message=answer["message"])
    return ToolError(
        kind="python_error",
        code=answer["exception"],
        message=f"{answer['exception']}: {answer['message']}",
        details={"py": {"exception": answer["exception"], "traceback": answer["traceback"]}},
    )
