"""The tasks of one command, in order, and what their policy rules say after each attempt.

task ─> rules ─┬─ continue ─> next task
  ^            ├─ retry ───── the same task, after a delay
  └────────────┼─ jump ────── any task
               └─ break, fail ─> the end

A task that waits for something elsewhere is the only one of its step; its command is parked, and no
rule is asked.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import structlog

from noetl_core.blob import ReferenceNotAvailableError
from noetl_core.domain.analysis import templates_in
from noetl_core.domain.errors import TemplateError, ToolError
from noetl_core.domain.playbook import Action
from noetl_core.domain.result_view import StepDocument
from noetl_core.domain.route import template_failure
from noetl_worker.names import Names
from noetl_worker.plan import Rendering, StepPlan, TaskPlan
from noetl_worker.tools.tool import ToolFailedError, ToolParked, ToolResult

JUMPS_MAX = 10_000
DELAY_SECONDS_MAX = 300.0
ATTEMPTS_SHOWN_MAX = 100

_CONTINUE = Action(do="continue")
_FAIL = Action(do="fail")

log = structlog.get_logger()


class Ended(NamedTuple):
    """How a pipeline ended: `error` is None for success."""

    data: Any = None
    error: ToolError | None = None
    task: str = ""
    """Of a pipeline of several tasks, the one that gave `data`."""
    earlier: Mapping[str, Any] = {}
    meta: Mapping[str, Any] = {}
    parked: ToolParked | None = None
    """What the command waits for: it has not ended at all."""
    frame_rows: int | None = None
    """Of a cursor loop: how many rows were claimed."""

    @property
    def document(self) -> Any:
        """The result as it is stored: its bare value where there is nothing else to say."""
        if not self.task and not self.meta:
            return self.data
        return StepDocument(
            data=self.data, task=self.task, earlier=dict(self.earlier), meta=dict(self.meta)
        )


class Runner(Protocol):
    """Runs one task's tool; the pipeline knows nothing about tools."""

    async def __call__(
        self, task: TaskPlan, config: Mapping[str, Any], given: Mapping[str, Any], attempt: int
    ) -> ToolResult | ToolParked: ...


class _Attempt(NamedTuple):
    label: str
    number: int
    result: ToolResult
    duration_ms: float


class Pipeline:
    def __init__(self, plan: StepPlan, names: Names, run_tool: Runner) -> None:
        self._plan = plan
        self._names = names
        self._run_tool = run_tool
        self._index = 0
        self._jumps = 0
        self._returned: dict[str, Any] = {}
        self._attempts: list[_Attempt] = []
        self._count = 0

    async def run(self) -> Ended:
        try:
            step_input = await self._names.step_input()
            while self._index < len(self._plan.tasks):
                ended = await self._advance(self._plan.tasks[self._index], step_input)
                if ended is not None:
                    return ended
            return self._end(None)
        except TemplateError as error:
            return self._end(template_failure(error))
        except ReferenceNotAvailableError as error:
            return self._end(error.as_tool_error())
        except ToolFailedError as error:
            return self._end(error.error)

    async def _advance(self, task: TaskPlan, step_input: Mapping[str, Any]) -> Ended | None:
        """One task with its retries; says how the pipeline ended, or None when it goes on."""
        number = 1
        while True:
            result = await self._attempt(task, step_input, number)
            if isinstance(result, ToolParked):
                return Ended(parked=result)
            action = await self._judge(task, step_input, result, number)
            if action.do != "retry" or number >= action.attempts:
                break
            await asyncio.sleep(_delay(action, number, result.error))
            number += 1
        self._returned[task.task.label] = result.data
        if len(self._plan.tasks) > 1:
            self._names.finish(task.task.label, result.data, result.error)
        return self._follow(task, action, result.error)

    async def _attempt(
        self, task: TaskPlan, step_input: Mapping[str, Any], number: int
    ) -> ToolResult | ToolParked:
        self._names.begin(task.task.label, number)
        started = time.perf_counter()
        try:
            given = await self._names.task_input(task, step_input)
            config = await self._names.task_config(task, given)
            result = await self._run_tool(task, config, given, number)
            if isinstance(result, ToolParked):
                return result
        except TemplateError as error:
            result = ToolResult(error=template_failure(error))
        except ReferenceNotAvailableError as error:
            result = ToolResult(error=error.as_tool_error())
        except ToolFailedError as error:
            result = ToolResult(error=error.error)
        self._record(task, number, result, started)
        return result

    def _record(self, task: TaskPlan, number: int, result: ToolResult, started: float) -> None:
        self._count += 1
        if len(self._attempts) < ATTEMPTS_SHOWN_MAX:
            duration_ms = round((time.perf_counter() - started) * 1000, 3)
            self._attempts.append(_Attempt(task.task.label, number, result, duration_ms))

    async def _judge(
        self, task: TaskPlan, step_input: Mapping[str, Any], result: ToolResult, number: int
    ) -> Action:
        """What the task sets, then the first rule that matches; without one, an error ends it."""
        default = _CONTINUE if result.error is None else _FAIL
        sets = task.set.value if result.error is None else None
        if not task.task.rules and not sets:
            return default
        meta = {"attempt": number, "duration_ms": self._attempts[-1].duration_ms}
        self._names.look_at(StepDocument(data=result.data, meta=meta), result.error)
        if sets:
            self._names.apply(await self._names.rendered(task.set, step_input))
        for place, rule in enumerate(task.task.rules):
            field = f"{task.field}.spec.policy.rules[{place}]"
            if rule.when is None or await self._names.holds(rule.when, step_input, f"{field}.when"):
                await self._set(rule.then, step_input, f"{field}.then.set")
                return rule.then
        return default

    async def _set(self, action: Action, step_input: Mapping[str, Any], field: str) -> None:
        if action.set:
            piece = Rendering(action.set, any(templates_in(action.set)), field)
            self._names.apply(await self._names.rendered(piece, step_input))

    def _follow(self, task: TaskPlan, action: Action, error: ToolError | None) -> Ended | None:
        match action.do:
            case "continue":
                self._index += 1
            case "jump":
                return self._jump(task, action)
            case "break":
                return self._end(None, task)
            case "retry" if error is None:
                self._index += 1
            case "retry" | "fail":
                return self._end(error or _failed_by_rule(task), task)
        return None

    def _jump(self, task: TaskPlan, action: Action) -> Ended | None:
        self._jumps += 1
        if self._jumps > JUMPS_MAX:
            message = f"task {task.task.label!r} jumped more than {JUMPS_MAX} times"
            return self._end(ToolError(kind="jump_limit", message=message), task)
        labels = [each.task.label for each in self._plan.tasks]
        self._index = (
            max(0, self._index - 1) if action.to == "previous" else labels.index(action.to or "")
        )
        return None

    def _end(self, error: ToolError | None, last: TaskPlan | None = None) -> Ended:
        tasks = self._plan.tasks
        label = (last or tasks[-1]).task.label if tasks else ""
        returned = dict(self._returned)
        data = returned.pop(label, None)
        is_pipeline = len(tasks) > 1
        return Ended(
            data=data,
            error=error,
            task=label if is_pipeline else "",
            earlier=returned if is_pipeline else {},
            meta=self._meta(),
        )

    def _meta(self) -> dict[str, Any]:
        """Every attempt, where there is more to say than that each task ran once and was quiet."""
        if self._count == len(self._returned) and not any(a.result.meta for a in self._attempts):
            return {}
        return {"attempt_count": self._count, "attempts": [_shown(a) for a in self._attempts]}


def _shown(attempt: _Attempt) -> dict[str, Any]:
    error = attempt.result.error
    shown: dict[str, Any] = {
        "task": attempt.label,
        "attempt": attempt.number,
        "status": "ok" if error is None else "error",
        "duration_ms": attempt.duration_ms,
        **attempt.result.meta,
    }
    if error is not None:
        shown["error"] = {"kind": error.kind, "message": error.message}
    return shown


def _delay(action: Action, number: int, error: ToolError | None) -> float:
    """How long to wait after attempt `number`; a server that says when to come back is believed."""
    delay = action.delay
    if action.backoff == "linear":
        delay *= number
    elif action.backoff == "exponential":
        delay *= 2.0 ** min(number - 1, 30)
    asked = 0.0 if error is None else float(error.details.get("retry_after", 0.0))
    return min(DELAY_SECONDS_MAX, max(delay, asked))


def _failed_by_rule(task: TaskPlan) -> ToolError:
    return ToolError(
        kind="policy", message=f"a rule of task {task.task.label!r} says that this is a failure"
    )
