"""`sink`: writes what a tool returned, in the same command and right after it.

Once a step, an iteration, a page, a run over claimed rows. A sink that fails fails the attempt. Its
key is the command's, without the number of the attempt: the next attempt at the same page has the
same key, the next page another. What is written together with its key (Postgres, DuckDB) is there
once, however often the command runs; the crash analysis is in sink_postgres.py. A server gets the
key as `Idempotency-Key` and code as `idempotency_key`: whether they do it once is up to them.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog

from noetl_core.domain.envelope import Reference
from noetl_core.domain.errors import TemplateError, ToolError
from noetl_core.domain.playbook import Sink
from noetl_core.domain.reader import duration
from noetl_core.domain.route import template_failure
from noetl_core.store.command import Leased
from noetl_worker import sink_duckdb, sink_postgres
from noetl_worker.names import Names
from noetl_worker.pipeline import Ended
from noetl_worker.plan import StepPlan
from noetl_worker.sink_rows import Written, rows_of
from noetl_worker.tools.postgres import PostgresTool
from noetl_worker.tools.registry import Registry
from noetl_worker.tools.tool import (
    Tool,
    ToolCall,
    ToolFailedError,
    ToolResult,
    wrong_field,
)

log = structlog.get_logger()


class Sinks:
    """Writes into whatever the worker has a tool for. `names` has the result as `output`."""

    def __init__(self, tools: Registry) -> None:
        self._tools = tools

    async def __call__(
        self, plan: StepPlan, names: Names, ended: Ended, leased: Leased
    ) -> ToolError | None:
        try:
            written = await self.write(plan, names, ended, leased)
        except TemplateError as error:
            return template_failure(error)
        except ToolFailedError as failed:
            return _of_sink(failed.error)
        if written.already_written:
            log.info(
                "sink.already_written",
                execution_id=leased.execution_id,
                command_id=leased.command_id,
            )
        return None

    async def write(self, plan: StepPlan, names: Names, ended: Ended, leased: Leased) -> Written:
        """Raises ToolFailedError, TemplateError, ReferenceNotAvailableError."""
        sink = plan.step.sink
        assert sink is not None, plan.step.step
        call = await _call(plan, names, leased)
        result = _result_of(plan, ended)
        if call.timeout_s is None:
            return await self._write(sink, call, result)
        try:
            async with asyncio.timeout(call.timeout_s):
                return await self._write(sink, call, result)
        except TimeoutError:
            message = f"it took longer than {call.timeout_s:g} s"
            error = ToolError(kind="timeout", message=message, retryable=True)
            raise ToolFailedError(error) from None

    async def _write(self, sink: Sink, call: ToolCall, result: "_Result") -> Written:
        match sink.tool:
            case "postgres":
                return await self._postgres(sink, call, result)
            case "duckdb":
                return await self._duckdb(sink, call, result)
            case "http":
                return await self._http(call, result)
            case "python":
                return await self._python(call, result)
            case "s3":
                message = "`sink.tool: s3` is not there yet: use postgres, duckdb, http or python"
                raise ToolFailedError(ToolError(kind="not_supported", message=message))

    async def _postgres(self, sink: Sink, call: ToolCall, result: "_Result") -> Written:
        tool = self._tool("postgres")
        assert isinstance(tool, PostgresTool), tool
        if sink.table:
            return await sink_postgres.write_rows(tool, call, sink, result.rows(call))
        return await sink_postgres.run_command(tool, call, _params(call))

    async def _duckdb(self, sink: Sink, call: ToolCall, result: "_Result") -> Written:
        tool = self._tool("duckdb")
        if sink.table:
            return await sink_duckdb.write_rows(tool, call, sink, result.rows(call))
        return await sink_duckdb.run_command(tool, call, _params(call))

    async def _http(self, call: ToolCall, result: "_Result") -> Written:
        args = call.config.get("args")
        headers = call.config.get("headers") or {}
        if not isinstance(headers, Mapping):
            raise wrong_field("headers", f"must be a mapping, not {type(headers).__name__}")
        named = {str(name).lower() for name in headers}
        own = {} if "idempotency-key" in named else {"Idempotency-Key": call.idempotency_key}
        config = {
            **{name: value for name, value in call.config.items() if name != "args"},
            "method": call.config.get("method") or "POST",
            "headers": {**headers, **own},
            "json": result.data if args is None else args,
        }
        return await self._run("http", call._replace(config=config))

    async def _python(self, call: ToolCall, result: "_Result") -> Written:
        args = call.config.get("args")
        given = args if isinstance(args, Mapping) else {} if args is None else {"args": args}
        own = {"result": result.data, "idempotency_key": call.idempotency_key}
        names = {**call.names, **own, **given}
        return await self._run("python", call._replace(input=given, names=names))

    async def _run(self, kind: str, call: ToolCall) -> Written:
        ended = await self._tool(kind).run(call)
        assert isinstance(ended, ToolResult), ended
        if ended.error is not None:
            raise ToolFailedError(ended.error)
        return Written()

    def _tool(self, kind: str) -> Tool:
        tool = self._tools.find(kind)
        if tool is None:
            message = f"this worker has no tool of kind {kind!r}"
            raise ToolFailedError(ToolError(kind="not_found", code="NO_TOOL", message=message))
        return tool


class _Result:
    """What the step returned, and where a page of it has its rows."""

    def __init__(self, data: Any, merge_path: str) -> None:
        self.data = data
        self._merge_path = merge_path

    def rows(self, call: ToolCall) -> list[dict[str, Any]]:
        return rows_of(call.config.get("args"), self.data, merge_path=self._merge_path)


def _result_of(plan: StepPlan, ended: Ended) -> _Result:
    pages = plan.step.retry.on_success
    return _Result(ended.data, "" if pages is None else pages.merge_path)


async def _call(plan: StepPlan, names: Names, leased: Leased) -> ToolCall:
    assert plan.sink is not None, plan.step.step
    assert plan.step.sink is not None, plan.step.step
    given = await names.step_input()
    rendered = await names.rendered(plan.sink, given, with_keychain=True)
    # What is not rendered, such as code, is taken as it stands.
    config = {**plan.step.sink.config, **rendered}
    return ToolCall(
        execution_id=leased.execution_id,
        command_id=leased.command_id,
        step=leased.step,
        label="sink",
        config=config,
        input=given,
        names={**names.element, **given},
        attempt=leased.attempt,
        timeout_s=_timeout(config),
        credential=names.credential,
        results=_NoResults(),
    )


def _timeout(config: Mapping[str, Any]) -> float | None:
    if config.get("timeout") is None:
        return None
    seconds = duration(config["timeout"])
    if seconds is None:
        raise wrong_field("timeout", "must be a duration such as 30s or 5m")
    return seconds


def _params(call: ToolCall) -> Any:
    params = call.config.get("params")
    return call.config.get("args") if params is None else params


def _of_sink(error: ToolError) -> ToolError:
    return msgspec.structs.replace(error, message=f"sink: {error.message}")


class _NoResults:
    """A sink gets its data, not references to it."""

    async def load(self, reference: Reference) -> Any:
        raise wrong_field("args", f"must be data, not a reference such as {reference.ref_id}")

    async def file(self, reference: Reference) -> Path | None:
        raise wrong_field("args", f"must be data, not a reference such as {reference.ref_id}")
