"""How a step is run, worked out once per playbook version: what is a template and what is not."""

import asyncio
from collections import OrderedDict
from typing import Any, NamedTuple

from noetl_core.domain.analysis import (
    cursor_config,
    pushed_paths,
    sink_config,
    task_field,
    templates_in,
)
from noetl_core.domain.errors import NotFoundError, TemplateError
from noetl_core.domain.ids import CatalogId, StepName
from noetl_core.domain.parse import parse_playbook
from noetl_core.domain.playbook import Playbook, Step, Task
from noetl_core.domain.template import compile_template
from noetl_core.domain.tools import is_raw
from noetl_core.store import catalog
from noetl_core.store.postgres import Pool

PLAYBOOKS_MAX = 256


class Rendering(NamedTuple):
    """A piece of a playbook, and whether there is anything to render in it."""

    value: dict[str, Any]
    is_templated: bool
    field: str


class TaskPlan(NamedTuple):
    task: Task
    field: str
    raw: dict[str, Any]
    """What the tool gets as it stands, such as code."""
    config: Rendering
    input: Rendering
    set: Rendering


class StepPlan(NamedTuple):
    playbook: Playbook
    step: Step
    input: Rendering
    tasks: tuple[TaskPlan, ...]
    pushed: tuple[str, ...]
    """Paths of the result that the broker routes on, the shortest first."""
    sink: Rendering | None = None
    cursor: Rendering | None = None
    claim_input: Rendering = Rendering({}, is_templated=False, field="input")
    """The step's input as far as it does not read the rows that a cursor has yet to claim."""

    @property
    def is_streamed(self) -> bool:
        """Whether anybody listens to the chunks of its result. A frame of rows has none."""
        return self.cursor is None and any(arc.on == "call.partial" for arc in self.step.next.arcs)


class Plans:
    """Plans by playbook version and step. A version never changes, so neither does its plan."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._playbooks: OrderedDict[CatalogId, dict[StepName, StepPlan]] = OrderedDict()
        self._loading: dict[CatalogId, asyncio.Task[dict[StepName, StepPlan]]] = {}

    async def find(self, catalog_id: CatalogId, step: StepName) -> StepPlan:
        """Raises NotFoundError."""
        steps = await self.steps_of(catalog_id)
        if step not in steps:
            raise NotFoundError(f"playbook {catalog_id} has no step {step!r}")
        return steps[step]

    async def steps_of(self, catalog_id: CatalogId) -> dict[StepName, StepPlan]:
        """Raises NotFoundError."""
        steps = self._playbooks.get(catalog_id)
        if steps is None:
            return await self._load_once(catalog_id)
        self._playbooks.move_to_end(catalog_id)
        return steps

    async def _load_once(self, catalog_id: CatalogId) -> dict[StepName, StepPlan]:
        """The first commands of a playbook arrive together: one of them loads it for all."""
        loading = self._loading.get(catalog_id)
        if loading is None:
            loading = self._loading[catalog_id] = asyncio.create_task(self._load(catalog_id))
            loading.add_done_callback(lambda _: self._loading.pop(catalog_id, None))
        # Shielded: the one that began may be cancelled, and the others still want it.
        return await asyncio.shield(loading)

    async def _load(self, catalog_id: CatalogId) -> dict[StepName, StepPlan]:
        content = await catalog.content_of(self._pool, catalog_id)
        if content is None:
            raise NotFoundError(f"playbook {catalog_id} is not in the catalog")
        playbook = parse_playbook(content, file=f"catalog {catalog_id}")
        steps = {name: plan_of(playbook, step) for name, step in playbook.steps.items()}
        self._playbooks[catalog_id] = steps
        if len(self._playbooks) > PLAYBOOKS_MAX:
            self._playbooks.popitem(last=False)
        return steps


def plan_of(playbook: Playbook, step: Step) -> StepPlan:
    cursor = None if step.loop is None else step.loop.cursor
    return StepPlan(
        playbook=playbook,
        step=step,
        input=_rendering(step.input, "input"),
        tasks=tuple(_plan_of_task(step, task) for task in step.tool),
        pushed=tuple(sorted(pushed_paths(playbook, step.step), key=len)),
        sink=None if step.sink is None else _rendering(sink_config(step.sink), "sink"),
        cursor=None if cursor is None else _rendering(cursor_config(cursor), "loop.cursor"),
        claim_input=_rendering(_before_the_rows(step), "input"),
    )


def _before_the_rows(step: Step) -> dict[str, Any]:
    if step.loop is None or step.loop.cursor is None:
        return {}
    rows = {"iter", step.loop.iterator}
    return {name: value for name, value in step.input.items() if not rows & _roots(value)}


def _roots(value: Any) -> set[str]:
    """The names that the templates in a value begin with."""
    roots: set[str] = set()
    for _, text in templates_in(value):
        try:
            roots |= compile_template(text).roots
        except TemplateError:
            continue  # it says so itself when it is rendered
    return roots


def _plan_of_task(step: Step, task: Task) -> TaskPlan:
    field = task_field(step, task)
    raw = {name: value for name, value in task.config.items() if is_raw(task.kind, name)}
    config = {name: value for name, value in task.config.items() if name not in raw}
    return TaskPlan(
        task=task,
        field=field,
        raw=raw,
        config=_rendering(config, field),
        input=_rendering(task.input, f"{field}.input"),
        set=_rendering(task.set, f"{field}.set"),
    )


def _rendering(value: dict[str, Any], field: str) -> Rendering:
    return Rendering(value, any(templates_in(value)), field)
