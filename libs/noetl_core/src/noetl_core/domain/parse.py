"""Text of a playbook to the model, or every problem with its place.

Unknown keys are errors. Keys of the language that this version cannot run yet say so. A document
of the classic dialect is turned into the current one first (see domain/classic.py).
"""

from collections.abc import Iterator

from noetl_core.domain.check import Finding, check, find_problems
from noetl_core.domain.classic import is_classic, modernise
from noetl_core.domain.errors import PlaybookInvalidError, Problem
from noetl_core.domain.ids import StepName
from noetl_core.domain.parse_step import Context, read_step, step_name
from noetl_core.domain.parse_tool import Places, read_workbook
from noetl_core.domain.playbook import (
    PATH_LENGTH_MAX,
    Defaults,
    Executor,
    ExecutorPolicy,
    ExecutorSpec,
    KeychainEntry,
    Metadata,
    Playbook,
    Step,
)
from noetl_core.domain.reader import Fields, Report
from noetl_core.domain.yaml_tree import Mapping, Node, Scalar, Sequence, data_of, read_tree

API_VERSIONS = ("noetl.io/v2", "noetl.io/v10")


_WARNINGS = f"{__name__}.warnings"

_PLAYBOOK_KEYS = (
    "apiVersion",
    "kind",
    "metadata",
    "executor",
    "keychain",
    "workload",
    "workbook",
    "workflow",
)


def parse_playbook(text: str, *, file: str = "playbook.yaml") -> Playbook:
    """The playbook, checked. Raises PlaybookInvalidError with every problem that was found."""
    tree, problems = read_tree(text, file=file)
    report = Report(problems)
    if is_classic(tree):
        tree = modernise(tree, report)
    places: Places = {}
    playbook = _read(report, places, tree)
    if playbook is not None:
        for finding in find_problems(playbook):
            _locate(report, places, tree, finding)
    ordered = sorted(report.problems, key=lambda problem: (problem.line, problem.column))
    errors = [problem for problem in ordered if problem.severity == "error"]
    if errors or playbook is None:
        raise PlaybookInvalidError(errors, file=file)
    playbook.__dict__[_WARNINGS] = tuple(ordered)
    return playbook


def warnings_of(playbook: Playbook) -> tuple[Problem, ...]:
    """What may be wrong with a playbook that can run."""
    kept: tuple[Problem, ...] | None = playbook.__dict__.get(_WARNINGS)
    return tuple(check(playbook)) if kept is None else kept


def format_problem(problem: Problem, file: str, source: str) -> str:
    """`file:line:column: message (hint)`, then the line itself and a caret under the place."""
    kind = "" if problem.severity == "error" else f"{problem.severity}: "
    hint = f" ({problem.hint})" if problem.hint else ""
    head = f"{file}:{problem.line}:{problem.column}: {kind}{problem.message}{hint}"
    lines = source.splitlines()
    if not 1 <= problem.line <= len(lines):
        return head
    line = lines[problem.line - 1].replace("\t", " ")
    return f"{head}\n  {line}\n  {' ' * (problem.column - 1)}^"


def _locate(report: Report, places: Places, tree: Node, finding: Finding) -> None:
    node = places.get((finding.step, finding.field)) or places.get((finding.step, "")) or tree
    for key in finding.place:
        if isinstance(node, Mapping) and isinstance(key, str):
            node = node.items.get(key, node)
        elif isinstance(node, Sequence) and isinstance(key, int):
            node = node.items[key]
    problem = finding.problem
    report.add(node, problem.message, key=problem.key, hint=problem.hint, severity=problem.severity)


def _read(report: Report, places: Places, tree: Node) -> Playbook | None:
    """None where there is too little to look at as a whole."""
    fields = Fields(report, tree, what="a playbook", known=_PLAYBOOK_KEYS)
    if not isinstance(tree, Mapping):
        # An empty list may stand for an empty section, but not for the document.
        if not report.problems:
            report.add(tree, "a playbook must be a mapping")
        return None
    _check_version(fields)
    metadata = _metadata(fields)
    executor = _executor(fields, places)
    keychain = tuple(_keychain(fields))
    timeout_s = executor.spec.policy.defaults.timeout_s
    workbook = read_workbook(report, fields.items("workbook"), timeout_s)
    steps = _steps(fields, places, Context(executor.spec, workbook))
    workload = fields.data("workload")
    if not steps:
        return None
    return Playbook(
        metadata=metadata, executor=executor, keychain=keychain, workload=workload, steps=steps
    )


def _check_version(fields: Fields) -> None:
    version = fields.required_text("apiVersion")
    if fields.required_text("kind") not in {"Playbook", ""}:
        fields.wrong("kind", "Playbook")
    if version and version not in API_VERSIONS:
        fields.wrong("apiVersion", " or ".join(API_VERSIONS))


def _metadata(fields: Fields) -> Metadata:
    if fields.get("metadata") is None:
        fields.missing("metadata")
        return Metadata(name="")
    inner = fields.section("metadata", known=("name", "path", "description", "labels", "tags"))
    name, path = inner.required_text("name"), inner.text("path")
    if len(path or name) > PATH_LENGTH_MAX or "\0" in (path or name):
        place = inner.get("path" if path else "name") or inner.node
        message = f"a path has up to {PATH_LENGTH_MAX} characters, and none of them is NUL"
        inner.report.add(place, message, key="path")
    return Metadata(
        name=name,
        path=path,
        description=inner.text("description"),
        labels=_labels(inner),
        tags=tuple(_written(tag) for tag in inner.items("tags")),
    )


def _labels(metadata: Fields) -> dict[str, str]:
    metadata.data("labels")
    node = metadata.get("labels")
    return {k: _written(v) for k, v in node.items.items()} if isinstance(node, Mapping) else {}


def _written(node: Node) -> str:
    """A label or tag as it was written: `1.10` is a text there, whatever YAML makes of it."""
    return node.text if isinstance(node, Scalar) else str(data_of(node))


def _executor(fields: Fields, places: Places) -> Executor:
    spec = fields.section("executor", known=("spec",)).section(
        "spec",
        known=(
            *("entry_step", "final_step", "no_next_is_error", "loop_mode", "timeout", "policy"),
        ),
    )
    policy = spec.section("policy", known=("defaults",))
    defaults = policy.section("defaults", known=("timeout_s",))
    for name in ("entry_step", "final_step"):
        places["", f"executor.spec.{name}"] = spec.get(name) or spec.node
    return Executor(
        spec=ExecutorSpec(
            entry_step=spec.text("entry_step") or None,
            final_step=spec.text("final_step") or None,
            no_next_is_error=spec.flag("no_next_is_error", default=False),
            loop_mode=spec.choice("loop_mode", "parallel", ExecutorSpec),
            timeout_s=spec.seconds("timeout"),
            policy=ExecutorPolicy(defaults=Defaults(timeout_s=defaults.seconds("timeout_s"))),
        )
    )


def _keychain(fields: Fields) -> Iterator[KeychainEntry]:
    for node in fields.items("keychain"):
        inner = Fields(fields.report, node, what="a keychain entry", known=("name", "kind"))
        yield KeychainEntry(name=inner.required_text("name"), kind=inner.text("kind"))


def _steps(fields: Fields, places: Places, context: Context) -> dict[StepName, Step]:
    nodes = fields.items("workflow", hint="write each step as `- step: NAME`")
    if not nodes and not isinstance(fields.get("workflow"), Mapping | Scalar):
        fields.missing("workflow")
    steps: dict[StepName, Step] = {}
    for node in nodes:
        name = step_name(fields.report, node)
        if name in steps:
            first = places[name, ""].line
            message = f"the step `{name}` was given in line {first} already"
            fields.report.add(node, message, key="step")
            name = None
        step = read_step(fields.report, {} if name is None else places, node, context)
        if name is not None:
            steps[name] = step
    return steps
