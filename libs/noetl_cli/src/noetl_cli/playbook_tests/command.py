"""A command as a worker performs it, with mocks in the place of its tools."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from noetl_cli.hidden_credentials import open_hidden
from noetl_cli.playbook_tests.mocks import SINK, Holds, Mocks, TestFailedError
from noetl_cli.playbook_tests.results import Results
from noetl_core.domain.brief import Brief
from noetl_core.domain.envelope import Reference
from noetl_core.domain.errors import TemplateError, ToolError
from noetl_core.domain.ids import CommandId
from noetl_core.domain.result_view import value_of
from noetl_core.domain.route import template_failure
from noetl_core.store.command import Leased
from noetl_worker.cursor import run_frame
from noetl_worker.names import Names
from noetl_worker.pipeline import Ended, Pipeline
from noetl_worker.plan import StepPlan, TaskPlan
from noetl_worker.tools.approval import ApprovalTool
from noetl_worker.tools.fail import FailTool
from noetl_worker.tools.noop import NoopTool
from noetl_worker.tools.tool import Tool, ToolCall, ToolParked, ToolResult
from noetl_worker.tools.wait import WaitTool

_REAL: dict[str, Tool] = {
    tool.kind: tool for tool in (NoopTool(), FailTool(), WaitTool(), ApprovalTool())
}
"""Tools that touch nothing outside, so that they need no mock."""


class Call(NamedTuple):
    """A tool that would have been called, and with what."""

    step: str
    label: str
    command_id: CommandId
    input: Mapping[str, Any]
    config: Mapping[str, Any]


class Command:
    """`calls` gets every call that would have been made."""

    def __init__(
        self,
        plan: StepPlan,
        brief: Brief,
        leased: Leased,
        mocks: Mocks,
        results: Results,
        calls: list[Call],
    ) -> None:
        self.plan = plan
        self.chunks: list[Any] = []
        self.leased = leased
        is_item = brief.element is not None and plan.cursor is None
        self._index = brief.element.index if is_item and brief.element is not None else None
        self._mocks = mocks
        self._calls = calls
        self._results = results

        async def load(reference: Reference) -> Any:
            return results.document(reference)

        self.names = Names(
            plan,
            brief,
            results.element(brief),
            execution_id=leased.execution_id,
            command_id=leased.command_id,
            load=load,
            open_credential=open_hidden,
        )

    async def run(self) -> Ended:
        if self.plan.cursor is None:
            return await self._run(self.names, self.leased)
        try:
            return await run_frame(
                self.plan, self.names, self.leased, claim=self._claim, run=self._run
            )
        except ExceptionGroup as group:  # rows run in a group of tasks
            raise group.exceptions[0] from None

    async def _run(self, names: Names, leased: Leased) -> Ended:
        step = self.plan.step.step
        if len(self.plan.tasks) > 1 and self._mocks.of_step(step) is not None:
            ended = await self._whole_step(names, leased)
        else:
            call = partial(self._call, names, leased)
            ended = await Pipeline(self.plan, names, call).run()
        if self.plan.sink is None or ended.error is not None or ended.parked is not None:
            return ended
        error = await self._sink(names, leased, ended)
        return ended if error is None else ended._replace(error=error)

    async def _whole_step(self, names: Names, leased: Leased) -> Ended:
        """All tasks of a pipeline at once: only what the step as a whole is given can be known."""
        try:
            given = await names.step_input()
        except TemplateError as error:
            return Ended(error=template_failure(error))
        self._note(leased, "", given, {})
        script = self._mocks.of_step(self.plan.step.step)
        assert script is not None, self.plan.step.step
        answer = await script.next(self._index, self._guard(names, given))
        self.chunks.extend(answer.chunks)
        return Ended(data=answer.result, error=answer.error)

    async def _call(
        self,
        names: Names,
        leased: Leased,
        task: TaskPlan,
        config: Mapping[str, Any],
        given: Mapping[str, Any],
        attempt: int,
    ) -> ToolResult | ToolParked:
        step, label, kind = self.plan.step.step, task.task.label, task.task.kind
        self._note(leased, label, given, config)
        script = self._mocks.of_task(step, label) or self._mocks.of_step(step)
        if script is not None:
            answer = await script.next(self._index, self._guard(names, given))
            self.chunks.extend(answer.chunks)
            return ToolResult(answer.result, answer.error)
        if kind not in _REAL:
            name = step if len(self.plan.tasks) == 1 else f"{step}.{label}"
            raise TestFailedError(
                f"step `{step}` calls `{kind}`, which a test does not: say what it returns with "
                f"`mocks: {{{name}: {{result: ...}}}}`"
            )
        call = ToolCall(
            execution_id=leased.execution_id,
            command_id=leased.command_id,
            step=step,
            label=label,
            config=config,
            input=given,
            names=given,
            attempt=attempt,
            timeout_s=task.task.timeout_s,
            credential=names.credential,
            results=_NoFiles(self._results),
        )
        return await _REAL[kind].run(call)

    async def _claim(
        self, task: TaskPlan, config: Mapping[str, Any], given: Mapping[str, Any], attempt: int
    ) -> ToolResult:
        del attempt  # a claim has one
        step = self.plan.step.step
        self._note(self.leased, task.task.label, given, config)
        frames = self._mocks.claims.get(step)
        if frames is None:
            raise TestFailedError(
                f"step `{step}` claims rows: say which with `mocks: {{{step}.claim: [[ROW, ...], "
                f"...]}}`, a list of rows for each claim"
            )
        rows = frames.next()
        return ToolResult({"rows": rows, "row_count": len(rows)})

    async def _sink(self, names: Names, leased: Leased, ended: Ended) -> ToolError | None:
        assert self.plan.sink is not None, self.plan.step.step
        names.look_at(ended.document, None)
        try:
            given = await names.step_input()
            config = await names.rendered(self.plan.sink, given, with_keychain=True)
        except TemplateError as error:
            return template_failure(error)
        self._note(leased, SINK, given, config)
        script = self._mocks.of_task(self.plan.step.step, SINK)
        if script is None:
            return None
        answer = await script.next(self._index, self._guard(names, given))
        return answer.error

    def _guard(self, names: Names, given: Mapping[str, Any]) -> Holds:
        async def holds(guard: str) -> bool:
            try:
                return await names.holds(guard, given, "mocks.when")
            except TemplateError as error:
                raise TestFailedError(f"a `when` of a mock cannot be evaluated: {error}") from error

        return holds

    def _note(
        self, leased: Leased, label: str, given: Mapping[str, Any], config: Mapping[str, Any]
    ) -> None:
        self._calls.append(Call(self.plan.step.step, label, leased.command_id, given, config))


class _NoFiles:
    """Results of the execution, for a tool that reads references itself."""

    def __init__(self, results: Results) -> None:
        self._results = results

    async def load(self, reference: Reference) -> Any:
        return value_of(self._results.document(reference))

    async def file(self, _reference: Reference) -> Path | None:
        return None
