"""perform: one command from its brief to the message that says how it ended.

Crash analysis. We die
- after the lease: nothing was said; the lease runs out and the broker issues the next attempt.
- while the tool runs: the same. The tool's effects may have happened; `idempotency_key` is the
  same in the next attempt, for targets that can use it.
- after the tool, before the message is out: the same. A large result lies in its tier under
  the name of the command, referred to by nobody; it goes with its execution.
- after the message is out: the broker records it. The row is gone, nothing is left to do.
"""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from noetl_core.blob import ReferenceNotAvailableError, ResultStore
from noetl_core.domain.brief import Brief, decode_brief
from noetl_core.domain.envelope import Reference
from noetl_core.domain.errors import NotFoundError, RejectedError, ToolError
from noetl_core.domain.ids import ExecutionId, WorkerId
from noetl_core.domain.result_view import value_of
from noetl_core.process.resilience import backoff_seconds
from noetl_core.store.command import Leased
from noetl_core.store.postgres import Pool, is_postgres_away
from noetl_core.wire.messages import Done, Failed
from noetl_worker.credentials import Credentials
from noetl_worker.names import Names
from noetl_worker.persist import persist
from noetl_worker.pipeline import Ended, Pipeline
from noetl_worker.plan import Plans, StepPlan, TaskPlan
from noetl_worker.tools.registry import Registry
from noetl_worker.tools.tool import ToolCall, ToolFailedError, ToolResult

log = structlog.get_logger()


class Performer:
    """What commands are performed with."""

    def __init__(
        self,
        pool: Pool,
        *,
        worker_id: WorkerId,
        plans: Plans,
        results: ResultStore,
        tools: Registry,
        credentials: Credentials,
    ) -> None:
        self._pool = pool
        self._worker_id = worker_id
        self._plans = plans
        self._results = results
        self._tools = tools
        self._credentials = credentials

    async def perform(self, leased: Leased) -> Done | Failed:
        started = time.perf_counter()
        try:
            return await self._perform(leased, started)
        except ReferenceNotAvailableError as error:
            return self._failed(leased, error.as_tool_error(), started)
        except RejectedError as error:
            kind = "not_found" if isinstance(error, NotFoundError) else "playbook_invalid"
            return self._failed(leased, ToolError(kind=kind, message=str(error)), started)
        except Exception as error:
            # A bug of ours or of a plugin. One command must not stop the others.
            log.exception(
                "command.broken", execution_id=leased.execution_id, command_id=leased.command_id
            )
            message = f"{type(error).__name__}: {error}"
            return self._failed(leased, ToolError(kind="internal", message=message[:500]), started)

    async def _perform(self, leased: Leased, started: float) -> Done | Failed:
        brief = decode_brief(leased.payload)
        plan = await self._patiently(lambda: self._plans.find(brief.catalog_id, brief.step))
        names = await self._names(leased, brief, plan)
        run_tool = _ToolRunner(leased, names, self._tools, _Results(self, leased.execution_id))
        timeout_s = plan.step.spec.timeout_s if brief.element is None else None
        ended = await _within(timeout_s, Pipeline(plan, names, run_tool))
        duration_ms = round((time.perf_counter() - started) * 1000, 3)
        return await persist(
            self._results, leased, self._worker_id, plan, ended, names, duration_ms
        )

    async def _names(self, leased: Leased, brief: Brief, plan: StepPlan) -> Names:
        async def open_credential(name: str) -> Any:
            return await self._patiently(lambda: self._credentials.open(name))

        return Names(
            plan,
            brief,
            await self._element(leased, brief),
            execution_id=leased.execution_id,
            command_id=leased.command_id,
            load=lambda reference: self.load(leased.execution_id, reference),
            open_credential=open_credential,
        )

    async def load(self, execution_id: ExecutionId, reference: Reference) -> Any:
        return await self._patiently(lambda: self._results.get(self._pool, execution_id, reference))

    async def file(self, execution_id: ExecutionId, reference: Reference) -> Path | None:
        if reference.execution_id is not None:
            return None  # whether it may be read is decided where it is loaded
        found: Path | None = await self._patiently(
            lambda: self._results.file_of(self._pool, execution_id, reference)
        )
        return found

    async def _element(self, leased: Leased, brief: Brief) -> Any:
        """The item of the loop; a large one is not in the brief but in its part."""
        where = brief.element
        if where is None or where.is_inline:
            return None if where is None else where.value
        part = await self._patiently(
            lambda: self._results.part(self._pool, leased.execution_id, where.loop_id, where.part)
        )
        return part[where.offset]

    async def _patiently(self, read: Any) -> Any:
        """Postgres away: what runs waits for it. If our lease is gone by then, so is this task."""
        failures = 0
        while True:
            try:
                return await read()
            except Exception as error:
                if not is_postgres_away(error):
                    raise
                failures += 1
                await asyncio.sleep(backoff_seconds(failures))

    def _failed(self, leased: Leased, error: ToolError, started: float) -> Failed:
        return Failed(
            execution_id=leased.execution_id,
            command_id=leased.command_id,
            worker_id=self._worker_id,
            error=error,
            duration_ms=round((time.perf_counter() - started) * 1000, 3),
        )


class _Results:
    """What the tools of one execution can read of its results."""

    def __init__(self, performer: Performer, execution_id: ExecutionId) -> None:
        self._performer = performer
        self._execution_id = execution_id

    async def load(self, reference: Reference) -> Any:
        return value_of(await self._performer.load(self._execution_id, reference))

    async def file(self, reference: Reference) -> Path | None:
        return await self._performer.file(self._execution_id, reference)


class _ToolRunner:
    """Runs the tool of a task within the task's time."""

    def __init__(self, leased: Leased, names: Names, tools: Registry, results: _Results) -> None:
        self._leased = leased
        self._results = results
        self._names = names
        self._tools = tools

    async def __call__(
        self, task: TaskPlan, config: Mapping[str, Any], given: Mapping[str, Any], attempt: int
    ) -> ToolResult:
        tool = self._tools.find(task.task.kind)
        if tool is None:
            message = f"this worker has no tool of kind {task.task.kind!r}"
            raise ToolFailedError(ToolError(kind="not_found", code="NO_TOOL", message=message))
        call = self._call(task, config, given, attempt)
        if call.timeout_s is None:
            return await tool.run(call)
        try:
            async with asyncio.timeout(call.timeout_s):
                return await tool.run(call)
        except TimeoutError:
            return ToolResult(error=_late(task.task.label, call.timeout_s))

    def _call(
        self, task: TaskPlan, config: Mapping[str, Any], given: Mapping[str, Any], attempt: int
    ) -> ToolCall:
        leased = self._leased
        return ToolCall(
            execution_id=leased.execution_id,
            command_id=leased.command_id,
            step=leased.step,
            label=task.task.label,
            config={**config, **task.raw} if task.raw else config,
            input=given,
            names={**self._names.element, **given} if self._names.element else given,
            attempt=attempt,
            timeout_s=task.task.timeout_s,
            credential=self._names.credential,
            results=self._results,
        )


async def _within(timeout_s: float | None, pipeline: Pipeline) -> Ended:
    if timeout_s is None:
        return await pipeline.run()
    try:
        async with asyncio.timeout(timeout_s):
            return await pipeline.run()
    except TimeoutError:
        return Ended(error=_late("the step", timeout_s))


def _late(what: str, timeout_s: float) -> ToolError:
    return ToolError(
        kind="timeout", message=f"{what} took longer than {timeout_s:g} s", retryable=True
    )
