"""What the templates of a playbook read, known before anything runs.

Two questions, each answered once per playbook:

- `reads_of`: what must a command carry so that its worker can render? (see domain/brief.py)
- `pushed_paths`: which fields of a result does the broker route on? The worker puts those into the
  envelope, and the broker decides without the payload.

Templates of a step run in two places. `loop.in`, admission, placement, `retry`, the step's `set`
and its arcs are the broker's; everything about the tool, `input`, `sink` and the claim of a cursor
is the worker's.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from noetl_core.domain.errors import TemplateError
from noetl_core.domain.ids import StepName
from noetl_core.domain.playbook import Cursor, Loop, Playbook, Sink, Step, Task, per_playbook
from noetl_core.domain.template import Path, Template, compile_template, is_template
from noetl_core.domain.tools import is_raw

ENVELOPE_FIELDS = frozenset({"status", "_ref", "ref", "error", "stats"})
"""What `s.` answers from the envelope alone: nothing has to be pushed for it."""

OUTPUT_ROOTS = frozenset({"output", "outcome"})

RESPONSE_ROOTS = OUTPUT_ROOTS | {"response"}
"""How the templates of `retry` call what a call returned."""

PIPELINE_ROOTS = frozenset({"_prev", "_task", "_attempt", "results"})

FRAME_ROOTS = frozenset({"__frame_max_rows", "__frame_lease_seconds"})
"""What the claim of a cursor loop is told."""

WORKER_ROOTS = (
    PIPELINE_ROOTS | FRAME_ROOTS | {"input", "iter", "keychain", "idempotency_key", "now", "uuid"}
)
"""Names that only templates evaluated by a worker have."""

RETRY_ROOTS = frozenset({"iter", "_attempt"})
"""Of those, the ones that the templates of `retry` have too."""

COMMON_ROOTS = OUTPUT_ROOTS | {
    *("workload", "ctx", "event", "error", "fanin", "response", "execution_id"),
}

ROOTS = WORKER_ROOTS | COMMON_ROOTS
"""Names with a meaning of their own. No step, input or iterator may be called so."""

Place = tuple[str | int, ...]


class Site(NamedTuple):
    """A value of a step that may hold templates. `field` is how messages call it."""

    step: Step
    field: str
    value: Any
    side: Literal["broker", "worker"]
    task: Task | None = None
    is_config: bool = False
    """The fields of a tool: the one place that sees the task's own input, and credentials."""


class Reads(NamedTuple):
    """What a step's worker reads of the execution. `ctx_keys` is None for all of ctx."""

    steps: frozenset[StepName] = frozenset()
    ctx_keys: frozenset[str] | None = frozenset()
    needs_payload: bool = False


def reads_of(playbook: Playbook, step: StepName) -> Reads:
    return _all_reads(playbook)[step]


def pushed_paths(playbook: Playbook, step: StepName) -> frozenset[str]:
    """Dotted paths below the step's result, as templates spell them: `data.total`, `rows`.

    The empty path is the whole result. A path ends where the template goes on by number or by a
    computed key. A loop has none: its results are read by reference, its counts are in the log.
    """
    return _all_pushed(playbook)[step]


@per_playbook
def ctx_keys(playbook: Playbook) -> frozenset[str]:
    """Everything that is ever set in ctx. Its keys are written out, so this is all there can be."""
    return frozenset(
        key.split(".")[1]
        for step in playbook.steps.values()
        for values in _set_blocks(step)
        for key in values
        if key.startswith("ctx.")
    )


def iter_keys(step: Step) -> frozenset[str]:
    """What the tasks of a step set in iter."""
    return frozenset(
        key.split(".")[1]
        for values in _set_blocks(step)
        for key in values
        if key.startswith("iter.")
    )


def sites_of(step: Step) -> Iterator[Site]:
    yield Site(step, "input", step.input, "worker")
    for number, rule in enumerate(step.spec.policy.admit):
        yield Site(step, f"spec.policy.admit.rules[{number}].when", rule.when, "broker")
    if step.spec.placement is not None:
        yield Site(step, "spec.placement.worker", step.spec.placement.worker, "broker")
        yield Site(step, "spec.placement.affinity", step.spec.placement.affinity, "broker")
    if step.loop is not None:
        yield from _loop_sites(step, step.loop)
    for task in step.tool:
        yield from _task_sites(step, task)
    yield from _retry_sites(step)
    if step.sink is not None:
        yield Site(step, "sink", sink_config(step.sink), "worker", is_config=True)
    yield Site(step, "set", step.set, "broker")
    for number, arc in enumerate(step.next.arcs):
        yield Site(step, f"next.arcs[{number}].when", arc.when, "broker")
        yield Site(step, f"next.arcs[{number}].set", arc.set, "broker")
        yield Site(step, f"next.arcs[{number}].input", arc.input, "broker")


def sink_config(sink: Sink) -> dict[str, Any]:
    """Everything of a sink that may hold templates."""
    config = {k: v for k, v in sink.config.items() if not is_raw(sink.tool, k)}
    return {"auth": sink.auth, "table": sink.table, "args": sink.args, **config}


def cursor_config(cursor: Cursor) -> dict[str, Any]:
    return {"auth": cursor.auth, "claim": cursor.claim}


def _loop_sites(step: Step, loop: Loop) -> Iterator[Site]:
    if loop.cursor is None:
        yield Site(step, "loop.in", loop.collection, "broker")
    else:
        yield Site(step, "loop.cursor", cursor_config(loop.cursor), "worker", is_config=True)


def _retry_sites(step: Step) -> Iterator[Site]:
    on_error, on_success = step.retry.on_error, step.retry.on_success
    if on_error is not None:
        yield Site(step, "retry.on_error.when", on_error.when, "broker")
    if on_success is not None:
        yield Site(step, "retry.on_success.while", on_success.condition, "broker")
        yield Site(step, "retry.on_success.next_call", on_success.next_call, "broker")


def task_field(step: Step, task: Task) -> str:
    """`tool`, or `tool.label` in a pipeline."""
    return "tool" if len(step.tool) == 1 else f"tool.{task.label}"


def templates_in(value: Any, place: Place = ()) -> Iterator[tuple[Place, str]]:
    """Every template in plain data, and where in it."""
    if is_template(value):
        yield place, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from templates_in(item, (*place, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from templates_in(item, (*place, index))


def _task_sites(step: Step, task: Task) -> Iterator[Site]:
    field = task_field(step, task)
    rendered = {k: v for k, v in task.config.items() if not is_raw(task.kind, k)}
    yield Site(step, field, rendered, "worker", task, is_config=True)
    yield Site(step, f"{field}.input", task.input, "worker", task)
    yield Site(step, f"{field}.set", task.set, "worker", task)
    for number, rule in enumerate(task.rules):
        place = f"{field}.spec.policy.rules[{number}]"
        yield Site(step, f"{place}.when", rule.when, "worker", task)
        yield Site(step, f"{place}.then.set", rule.then.set, "worker", task)


def _set_blocks(step: Step) -> Iterator[dict[str, Any]]:
    yield step.set
    yield from (arc.set for arc in step.next.arcs)
    for task in step.tool:
        yield task.set
        yield from (rule.then.set for rule in task.rules)


@per_playbook
def _all_reads(playbook: Playbook) -> dict[StepName, Reads]:
    return {name: _reads_of_step(playbook, step) for name, step in playbook.steps.items()}


def _reads_of_step(playbook: Playbook, step: Step) -> Reads:
    steps: set[StepName] = set()
    keys: set[str] = set()
    whole_ctx = needs_payload = False
    for site, path in _paths_read(step, "worker"):
        root = path[0]
        if root == "ctx":
            whole_ctx |= len(path) == 1
            keys.update(path[1:2])
        elif root == "workload":
            needs_payload = True
        elif root not in ROOTS and not _is_own_name(site, root):
            # A bare name is looked for in results, ctx and workload, and which of them has it
            # is only known when the step runs.
            if root in playbook.steps:
                steps.add(StepName(root))
            if root in ctx_keys(playbook):
                keys.add(root)
            needs_payload |= root not in playbook.steps or root in playbook.workload
    return Reads(frozenset(steps), None if whole_ctx else frozenset(keys), needs_payload)


def inputs_of(site: Site) -> set[str]:
    """The inputs that are there when the site is rendered.

    An input is not there while it is rendered itself: `users: "{{ users }}"` reads a step.
    """
    if site.side == "broker" or site.field == "input":
        return set()
    of_task = site.task.input if site.is_config and site.task is not None else {}
    return {*site.step.input, *of_task}


def _is_own_name(site: Site, name: str) -> bool:
    """Whether the input or the iterator answers for the name, so that no one else is asked."""
    loop = site.step.loop
    return (loop is not None and name == loop.iterator) or name in inputs_of(site)


@per_playbook
def _all_pushed(playbook: Playbook) -> dict[StepName, frozenset[str]]:
    pushed: dict[StepName, set[str]] = {name: set() for name in playbook.steps}
    for step in playbook.steps.values():
        for site, (root, *fields) in _paths_read(step, "broker"):
            source = site.step.step if root in RESPONSE_ROOTS else StepName(root)
            if source not in playbook.steps:
                continue
            # A loop's results are read by reference; `retry` looks at what one call returned.
            if playbook.steps[source].loop is not None and not site.field.startswith("retry."):
                continue
            if not fields or fields[0] not in ENVELOPE_FIELDS:
                pushed[source].add(_dotted(fields))
    return {name: frozenset(paths) for name, paths in pushed.items()}


def _dotted(fields: list[str]) -> str:
    """A field with a dot in its own name ends the path: it could not be told from two."""
    kept: list[str] = []
    for field in fields:
        if "." in field:
            break
        kept.append(field)
    return ".".join(kept)


def _paths_read(step: Step, side: Literal["broker", "worker"]) -> Iterator[tuple[Site, Path]]:
    for site in sites_of(step):
        if site.side == side:
            for _, text in templates_in(site.value):
                yield from ((site, path) for path in _compiled(text).paths)


def _compiled(text: str) -> Template:
    """A template that cannot be compiled reads nothing: it fails when it is evaluated."""
    try:
        return compile_template(text)
    except TemplateError:
        return Template(text)
