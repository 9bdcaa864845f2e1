"""`noetl render`: what a step would run with, rendered by the worker's own code; nothing is run."""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import msgspec

from noetl_cli.hidden_credentials import open_hidden
from noetl_core.domain.analysis import ctx_keys
from noetl_core.domain.brief import Brief, Element
from noetl_core.domain.envelope import Envelope, Reference
from noetl_core.domain.errors import TemplateError
from noetl_core.domain.ids import CatalogId, CommandId, ExecutionId, LoopId, RefId, StepName
from noetl_core.domain.known import Known
from noetl_core.domain.loop import in_chunks
from noetl_core.domain.playbook import Playbook
from noetl_core.domain.route import loop_collection
from noetl_core.domain.state import ExecutionState, StepState
from noetl_worker.names import Names
from noetl_worker.plan import StepPlan, TaskPlan, plan_of

ITEMS_SHOWN = 3

_EXECUTION = ExecutionId(0)


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in for an execution. `results`: by step, or by `step.task` in a pipeline."""

    payload: dict[str, Any]
    ctx: dict[str, Any]
    results: dict[str, Any]
    items: list[Any]
    """The item of a loop, or none: then it is the one at `index` of the loop's own."""
    index: int


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A template that cannot be rendered, and the option that would help."""

    field: str
    message: str
    name: str = ""
    hint: str = ""


class LoopView(msgspec.Struct, frozen=True):
    total: int
    first: list[Any]


class TaskView(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    kind: str
    input: Any = None
    config: Any = None


class Preview(msgspec.Struct, omit_defaults=True):
    step: str
    loop: LoopView | None = None
    cursor: Any = None
    input: Any = None
    tool: list[TaskView] = []
    sink: Any = None
    problems: list[Problem] = []


async def preview(playbook: Playbook, step: str, given: Given) -> Preview:
    return await _Preview(playbook, playbook.steps[StepName(step)].step, given).made()


class _Preview:
    def __init__(self, playbook: Playbook, step: StepName, given: Given) -> None:
        self._playbook = playbook
        self._given = given
        self._plan: StepPlan = plan_of(playbook, playbook.steps[step])
        self._documents = _Documents(playbook, given)
        self._view = Preview(step=step)

    async def made(self) -> Preview:
        items = self._loop_items()
        names = self._names(items)
        if names is not None:
            await self._render(names)
        return self._view

    def _loop_items(self) -> list[Any]:
        loop = self._plan.step.loop
        if loop is None or loop.cursor is not None:
            return []
        state, known = self._documents.as_broker()
        try:
            found = loop_collection(self._playbook, state, self._plan.step, known)
        except TemplateError as error:
            self._note(error)
            return []
        if not isinstance(found, list):
            message = f"it must give a list, and gives a {type(found).__name__}"
            self._view.problems.append(Problem("loop.in", message))
            return []
        items = in_chunks(loop, found)
        self._view.loop = LoopView(len(items), items[:ITEMS_SHOWN])
        return items

    def _names(self, items: list[Any]) -> Names | None:
        """None where there is no item to show the step with."""
        given, loop = self._given, self._plan.step.loop
        element, where = None, None
        if loop is not None and (given.items or loop.cursor is None):
            if not given.items and given.index >= len(items):
                self._say_that_there_is_none(len(items))
                return None
            element = given.items[0] if given.items else items[given.index]
            where = Element(
                index=given.index,
                total=max(len(items), given.index + 1),
                loop_id=LoopId(0),
                part=0,
                offset=0,
                value=element,
            )
        return Names(
            self._plan,
            self._documents.brief(self._plan.step.step, where),
            element,
            execution_id=_EXECUTION,
            command_id=CommandId(f"{self._plan.step.step}.1#1"),
            load=self._documents.load,
            open_credential=open_hidden,
        )

    def _say_that_there_is_none(self, count: int) -> None:
        if self._view.loop is None:
            return  # why there are none is said already
        message = f"the loop has {count} items, and none at {self._given.index}"
        self._view.problems.append(Problem("loop.in", message, hint="--item JSON"))

    async def _render(self, names: Names) -> None:
        view, plan = self._view, self._plan
        if plan.cursor is not None:
            names = await self._claim(names)
        view.input = await self._try(names.step_input)
        if view.input is None:
            return  # what reads it would only say the same again
        for task in plan.tasks:
            await self._task(names, task, view.input)
        if plan.sink is not None:
            await self._sink(names, view.input)

    async def _claim(self, names: Names) -> Names:
        """What is claimed with; from then on a row that was given is the item."""
        cursor = self._plan.cursor
        assert cursor is not None, self._plan.step.step
        names.begin_claim()
        given = await self._try(names.claim_input)
        self._view.cursor = await self._try(
            lambda: names.rendered(cursor, given or {}, with_keychain=True)
        )
        if not self._given.items:
            return names
        command_id = CommandId(f"{self._plan.step.step}.1#1")
        row = self._given.items[0]
        return names.of_rows(row, index=self._given.index, total=1, command_id=command_id)

    async def _task(self, names: Names, task: TaskPlan, step_input: Mapping[str, Any]) -> None:
        label, step = task.task.label, self._plan.step.step
        names.begin(label, 1)
        given = await self._try(lambda: names.task_input(task, step_input))
        config = None
        if given is not None:
            config = await self._try(lambda: names.task_config(task, given))
        self._view.tool.append(TaskView(label, task.task.kind, given, config))
        results = self._given.results
        if len(self._plan.tasks) > 1 and f"{step}.{label}" in results:
            names.finish(label, results[f"{step}.{label}"], None)

    async def _sink(self, names: Names, step_input: Mapping[str, Any]) -> None:
        piece, step = self._plan.sink, self._plan.step.step
        assert piece is not None, step
        if step in self._given.results:
            names.look_at(self._given.results[step], None)
        self._view.sink = await self._try(
            lambda: names.rendered(piece, step_input, with_keychain=True)
        )

    async def _try(self, render: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await render()
        except TemplateError as error:
            self._note(error)
            return None

    def _note(self, error: TemplateError) -> None:
        name = error.name or ""
        hint = _hint(self._playbook, self._plan, error)
        self._view.problems.append(Problem(error.field, error.reason, name=name, hint=hint))


class _Documents:
    """The payload and the results that were given, behind references as everywhere else."""

    def __init__(self, playbook: Playbook, given: Given) -> None:
        self._documents: dict[RefId, Any] = {RefId(0): given.payload}
        self._ctx = given.ctx
        self._steps: dict[StepName, Envelope] = {}
        for number, (name, result) in enumerate(given.results.items(), 1):
            if name in playbook.steps:
                self._steps[StepName(name)] = _envelope(RefId(number))
                self._documents[RefId(number)] = result

    def as_broker(self) -> tuple[ExecutionState, Known]:
        steps = {
            n: StepState(visit=1, status="COMPLETED", result=e) for n, e in self._steps.items()
        }
        state = ExecutionState(
            execution_id=_EXECUTION, ctx=self._ctx, steps=steps, payload=_envelope(RefId(0))
        )
        return state, Known(results=self._documents)

    def brief(self, step: StepName, element: Element | None) -> Brief:
        return Brief(
            catalog_id=CatalogId(0),
            step=step,
            visit=1,
            attempt=1,
            element=element,
            ctx=dict(self._ctx),
            steps=self._steps,
            payload=_envelope(RefId(0)),
        )

    async def load(self, reference: Reference) -> Any:
        return self._documents[reference.ref_id]


def _envelope(ref_id: RefId) -> Envelope:
    return Envelope(status="ok", reference=Reference(ref_id=ref_id, type="db"))


_AFTER_THE_TOOL = frozenset({"output", "outcome"})
_OF_PIPELINE = frozenset({"_prev", "results"})


def _hint(playbook: Playbook, plan: StepPlan, error: TemplateError) -> str:
    """The option that would bring what is missing, by the name that the template begins with."""
    step, loop = plan.step.step, plan.step.loop
    for root in _roots(error):
        if root in playbook.steps:
            return f"--result {root}=JSON"
        if root == "ctx" or root in ctx_keys(playbook):
            return "--ctx JSON"
        if loop is not None and root in {"iter", loop.iterator}:
            return "--item JSON"
        if root in _AFTER_THE_TOOL:
            return f"--result {step}=JSON"
        if root in _OF_PIPELINE or root in {task.task.label for task in plan.tasks}:
            return f"--result {step}.TASK=JSON"
    if error.name is None:
        return ""
    return f"--set {error.name}=VALUE" if _is_of_workload(error) else ""


def _roots(error: TemplateError) -> Iterator[str]:
    """`fetch.total` is not there: what is missing is spelled from its root on."""
    spelled = error.reason.split("`")[1] if "`" in error.reason else ""
    yield spelled.split(".", maxsplit=1)[0]
    if error.name is not None:
        yield error.name


def _is_of_workload(error: TemplateError) -> bool:
    spelled = error.reason.split("`")[1] if "`" in error.reason else ""
    return spelled.startswith("workload.") or spelled == error.name
