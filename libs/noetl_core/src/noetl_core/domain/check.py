"""What is wrong with a playbook as a whole: arcs that lead nowhere, names that nobody defines.

An error is certain: the template will fail whenever it is evaluated. Where the payload of a request
may still bring the name, it is a warning.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from noetl_core.domain.analysis import (
    FRAME_ROOTS,
    RESPONSE_ROOTS,
    RETRY_ROOTS,
    ROOTS,
    WORKER_ROOTS,
    Place,
    Site,
    ctx_keys,
    inputs_of,
    iter_keys,
    sites_of,
    task_field,
    templates_in,
)
from noetl_core.domain.errors import Problem, TemplateError
from noetl_core.domain.graph import graph_of
from noetl_core.domain.playbook import Playbook, Step
from noetl_core.domain.reader import suggestion
from noetl_core.domain.template import Path, compile_template, nearest
from noetl_core.domain.tools import TOOLS

ITERATION_FIELDS = frozenset({"index", "first", "last", "parent"})

_PLACEMENT = "spec.placement"
_BEFORE_THE_STEP = ("loop.in", "spec.policy.admit", _PLACEMENT)
_AFTER_THE_STEP = RESPONSE_ROOTS | {"event", "error", "fanin"}
_TEMPLATE_IN_CODE = re.compile(r"\{\{\s*(workload|ctx|iter|input|output|keychain)\.")


class Finding(NamedTuple):
    """A problem and where: a field of a step, and a place inside its value."""

    problem: Problem
    step: str
    field: str
    place: Place = ()


def check(playbook: Playbook) -> list[Problem]:
    """Every problem, without lines: those are known only to whoever has the document."""
    return [finding.problem for finding in find_problems(playbook)]


def find_problems(playbook: Playbook) -> Iterator[Finding]:
    yield from _named_steps(playbook)
    for step in playbook.steps.values():
        yield from _arcs(playbook, step)
        yield from _code(step)
        for site in sites_of(step):
            yield from _templates(playbook, site)
    if playbook.entry_step in playbook.steps:
        yield from _unreachable(playbook)


def _named_steps(playbook: Playbook) -> Iterator[Finding]:
    spec = playbook.executor.spec
    for key, name in (("entry_step", spec.entry_step), ("final_step", spec.final_step)):
        if name is not None and name not in playbook.steps:
            problem = _unknown_step(f"`{key}: {name}`", name, playbook, key)
            yield Finding(problem, "", f"executor.spec.{key}")


def _arcs(playbook: Playbook, step: Step) -> Iterator[Finding]:
    for number, arc in enumerate(step.next.arcs):
        if arc.step and arc.step not in playbook.steps:
            what = f"step `{step.step}`: an arc to `{arc.step}`"
            problem = _unknown_step(what, arc.step, playbook, "step")
            yield Finding(problem, step.step, f"next.arcs[{number}].step")


def _unknown_step(what: str, name: str, playbook: Playbook, key: str) -> Problem:
    hint = suggestion(name, playbook.steps)
    return Problem(message=f"{what} names no step of this playbook", key=key, hint=hint)


def _unreachable(playbook: Playbook) -> Iterator[Finding]:
    for name in playbook.steps:
        if name not in graph_of(playbook).reachable:
            message = f"the step `{name}` is never reached: no arc leads to it"
            problem = Problem(message=message, key="step", severity="warning")
            yield Finding(problem, name, "")


def _code(step: Step) -> Iterator[Finding]:
    """Code is not rendered; whoever writes a template into it finds out too late."""
    for task in step.tool:
        for field in TOOLS[task.kind].raw if task.kind in TOOLS else ():
            code = task.config.get(field)
            if isinstance(code, str) and _TEMPLATE_IN_CODE.search(code):
                where = task_field(step, task)
                message = f"step `{step.step}`: `{field}` is code, templates in it are not rendered"
                hint = "pass the value with `input`"
                problem = Problem(message=message, key=field, hint=hint, severity="warning")
                yield Finding(problem, step.step, where, (field,))


def _templates(playbook: Playbook, site: Site) -> Iterator[Finding]:
    for place, text in templates_in(site.value):
        field = site.field + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place)
        for problem in _template_problems(playbook, site, text, field):
            yield Finding(problem, site.step.step, site.field, place)


def _template_problems(playbook: Playbook, site: Site, text: str, field: str) -> Iterator[Problem]:
    where = f"step `{site.step.step}`, field `{field}`"
    key = field.rpartition(".")[2]
    try:
        template = compile_template(text)
    except TemplateError as error:
        yield Problem(message=f"{where}: {error.reason}", key=key)
        return
    for path in sorted(template.paths - template.optional_paths):
        doubt = _doubt(playbook, site, path)
        if doubt is not None:
            yield Problem(
                message=f"{where}: {doubt.message}",
                key=path[0],
                hint=doubt.hint,
                severity=doubt.severity,
            )


def _doubt(playbook: Playbook, site: Site, path: Path) -> Problem | None:
    """What speaks against one name that a template reads."""
    root = path[0]
    if root not in ROOTS:
        return _bare_doubt(playbook, site, root)
    if root in playbook.workload or root in ctx_keys(playbook):
        return None
    is_retry = site.field.startswith("retry.")
    if site.side == "broker" and root in WORKER_ROOTS - _broker_roots(site):
        hint = "the broker evaluates this field; use ctx, workload or the result of a step"
        return Problem(message=f"`{root}` is there for the tool only", hint=hint)
    if site.side == "worker" and root == "event":
        return Problem(message="`event` is there in `next` and in the `set` of a step only")
    if root == "keychain" and not site.is_config:
        hint = "use it in a field of the tool: it is never recorded"
        return Problem(message="`keychain` is not there", hint=hint)
    if root in _AFTER_THE_STEP and site.field.startswith(_BEFORE_THE_STEP):
        return Problem(message=f"`{root}` is not there before the step has run")
    if root == "response" and not is_retry:
        return Problem(message="`response` is there in `retry` only", hint="use `output`")
    if root == "fanin" and (site.step.loop is None or site.side == "worker" or is_retry):
        return Problem(message="`fanin` is there only after a loop, in its `set` and its arcs")
    if root in FRAME_ROOTS and site.field != "loop.cursor":
        return Problem(message=f"`{root}` is there in the claim of a cursor loop only")
    return _field_doubt(playbook, site, root, path[1]) if len(path) > 1 else None


def _broker_roots(site: Site) -> frozenset[str]:
    """Names of the worker that some templates of the broker have too."""
    if site.field.startswith("retry."):
        return RETRY_ROOTS
    if site.field.startswith(_PLACEMENT):
        return frozenset({"input", "iter"})
    return frozenset({"input"}) if site.field.startswith(_BEFORE_THE_STEP) else frozenset()


def _brought(playbook: Playbook, step: Step) -> set[str]:
    """Inputs that arcs bring along."""
    arcs = (arc for source in playbook.steps.values() for arc in source.next.arcs)
    return {name for arc in arcs if arc.step == step.step for name in arc.input}


def _bare_doubt(playbook: Playbook, site: Site, name: str) -> Problem | None:
    shared = {*playbook.steps, *ctx_keys(playbook), *playbook.workload}
    is_retry = site.field.startswith("retry.")
    there = _names_there(site) if site.side == "worker" or is_retry else set()
    if site.side == "worker" or site.field.startswith(_BEFORE_THE_STEP):
        there |= _brought(playbook, site.step)
    if site.field.startswith(_PLACEMENT) and site.step.loop is not None:
        there.add(site.step.loop.iterator)
    if name in shared or name in there:
        return None
    if name in _own_names(site.step) and site.side == "broker":
        return Problem(message=f"`{name}` is there for the tool only")
    near = nearest(name, shared | there)
    hint = f"did you mean `{near}`?" if near else "the payload of each request must bring it"
    message = f"`{name}` is not defined in the playbook"
    return Problem(message=message, hint=hint, severity="warning")


def _own_names(step: Step) -> set[str]:
    """Bare names that only the tool of this step can have."""
    names = {task.label for task in step.tool} | {*step.input}
    names.update(*(task.input for task in step.tool))
    return names | {step.loop.iterator} if step.loop else names


def _names_there(site: Site) -> set[str]:
    labels = {task.label for task in site.step.tool}
    iterator = {site.step.loop.iterator} if site.step.loop else set()
    return inputs_of(site) | labels | iterator


def _field_doubt(playbook: Playbook, site: Site, root: str, field: str) -> Problem | None:
    match root:
        case "ctx":
            known, message = set(ctx_keys(playbook)), "is not set anywhere"
        case "input":
            known = inputs_of(site) | _brought(playbook, site.step)
            message = "is not an input here"
        case "iter":
            known, message = _iteration(site.step), "is not there in this step"
        case "keychain" if field not in {entry.name for entry in playbook.keychain}:
            message = f"`keychain.{field}` is not listed in `keychain`"
            return Problem(message=message, severity="warning")
        case "workload" if field not in playbook.workload:
            near = nearest(field, playbook.workload)
            hint = f"did you mean `{near}`?" if near else "each request must bring it"
            message = f"`workload.{field}` has no default"
            return Problem(message=message, hint=hint, severity="warning")
        case _:
            return None
    if field in known:
        return None
    near = nearest(field, known)
    hint = f"did you mean `{root}.{near}`?" if near else ""
    return Problem(message=f"`{root}.{field}` {message}", hint=hint)


def _iteration(step: Step) -> set[str]:
    names = {*iter_keys(step), "parent"}  # a playbook may be called from a loop
    return names | ITERATION_FIELDS | {step.loop.iterator} if step.loop else names
