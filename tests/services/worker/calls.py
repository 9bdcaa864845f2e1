"""A call of a tool, as the pipeline would make it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from noetl_core.domain.envelope import Reference
from noetl_core.domain.errors import ToolError
from noetl_core.domain.ids import CommandId, ExecutionId
from noetl_worker.tools.tool import (
    Credential,
    Results,
    Tool,
    ToolCall,
    ToolFailedError,
    ToolParked,
    ToolResult,
)


class NoResults:
    """An execution in which nothing was stored yet."""

    async def load(self, reference: Reference) -> Any:
        raise LookupError(reference)

    async def file(self, reference: Reference) -> Path | None:
        raise LookupError(reference)


def call_of(
    config: Mapping[str, Any] | None = None,
    *,
    given: Mapping[str, Any] | None = None,
    names: Mapping[str, Any] | None = None,
    credentials: Mapping[str, Mapping[str, Any]] | None = None,
    timeout_s: float | None = None,
    results: Results | None = None,
) -> ToolCall:
    async def credential(name: str) -> Credential:
        return Credential(name, "", (credentials or {})[name])

    return ToolCall(
        execution_id=ExecutionId(1),
        command_id=CommandId("a.1#1"),
        step="a",
        label="task_0",
        config=config or {},
        input=given or {},
        names={**(names or {}), **(given or {})},
        attempt=1,
        timeout_s=timeout_s,
        credential=credential,
        results=results or NoResults(),
    )


async def run(tool: Tool, **fields: Any) -> ToolResult:
    """With a refusal as the result it becomes in a pipeline."""
    try:
        result = await tool.run(call_of(**fields))
    except ToolFailedError as refused:
        return ToolResult(error=refused.error)
    assert not isinstance(result, ToolParked), result
    return result


async def parked(tool: Tool, **fields: Any) -> ToolParked:
    """What a tool that must wait waits for."""
    result = await tool.run(call_of(**fields))
    assert isinstance(result, ToolParked), result
    return result


async def data(tool: Tool, **fields: Any) -> Any:
    result = await run(tool, **fields)
    assert result.error is None, result.error
    return result.data


async def error(tool: Tool, **fields: Any) -> ToolError:
    result = await run(tool, **fields)
    assert result.error is not None, result.data
    return result.error
