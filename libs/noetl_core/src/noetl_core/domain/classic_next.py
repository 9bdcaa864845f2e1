"""Where a step of the classic dialect goes: a name, a list, `when` / `then` / `else`, as arcs.

The first branch whose guard holds is taken, with all of its targets:

- Targets without a guard before the first guarded branch are always taken.
- Guarded branches: `{when, then}` or `{step, when}`; the first that holds.
- `else`, or targets without a guard after the last guarded branch: where none held.

Where each branch has one target and none is always taken, that is what `exclusive` means, and the
guards stay as they are. Several targets at once need `inclusive`, where every true arc is taken; so
the guard of a branch also denies those of the branches before it.
"""

from typing import NamedTuple

from noetl_core.domain.analysis import OUTPUT_ROOTS
from noetl_core.domain.errors import TemplateError
from noetl_core.domain.reader import Report, suggestion
from noetl_core.domain.template import compile_template
from noetl_core.domain.tree_edit import Draft, empty_at, expression_of, list_at, text_at, text_of
from noetl_core.domain.yaml_tree import Mapping, Node, Scalar, Sequence, describe

INPUTS = ("with", "data", "args", "payload", "input")
"""What a step or an arc hands over, each overlaying those before it."""

_FAILURE_ROOTS = frozenset({"event", "error", *OUTPUT_ROOTS})
"""A failed step asks only arcs whose guard reads one of these (see domain/route.py)."""

_TARGET = "write `step: NAME`, or `when`, `then` and `else`"
_BRANCH_KEYS = ("when", "then", "else", *INPUTS)


class _Branch(NamedTuple):
    guard: Node
    targets: list[Mapping]


class _Branches:
    def __init__(self) -> None:
        self.always: list[Mapping] = []
        self.guarded: list[_Branch] = []
        self.otherwise: list[Mapping] = []

    def is_first_match(self) -> bool:
        """Whether no more than one target is ever taken."""
        several = any(len(branch.targets) > 1 for branch in self.guarded)
        if not self.guarded:
            return len(self.always) <= 1
        return not (several or self.always or len(self.otherwise) > 1)


def is_classic_next(node: Node | None) -> bool:
    match node:
        case Scalar(value=str()) | Sequence():
            return True
        case Mapping(items=fields):
            return bool(fields) and "arcs" not in fields and "spec" not in fields
    return False


def modern_next(report: Report, node: Node) -> Node:
    """`{spec, arcs}` for what the classic dialect says."""
    entries = node.items if isinstance(node, Sequence) else [node]
    branches = _read(report, entries)
    arcs = _arcs(report, branches)
    modern = empty_at(node)
    if len(arcs) > 1:
        spec = empty_at(node)
        mode = "exclusive" if branches.is_first_match() else "inclusive"
        spec.put("mode", text_at(node, mode))
        modern.put("spec", spec.finished())
    modern.put("arcs", list_at(node, list(arcs)))
    return modern.finished()


def merged_inputs(report: Report, draft: Draft, names: tuple[str, ...] = INPUTS) -> None:
    """Put everything a mapping hands over under `input`."""
    given = [name for name in names if name in draft.items]
    if given in ([], ["input"]):
        return
    merged = empty_at(draft.key(given[0]))
    for name in given:
        node = draft.take(name)
        if isinstance(node, Mapping):
            Draft(node).move(node.items, merged)
        elif node is not None:
            message = f"`{name}` must be a mapping of names to values, not {describe(node)}"
            report.add(node, message, key=name, hint=f"give it a name: `input: {{{name}: ...}}`")
    draft.put("input", merged.finished(), key=draft.key(given[0]))


def _read(report: Report, entries: list[Node]) -> _Branches:
    branches = _Branches()
    for entry in entries:
        if branches.otherwise and _is_guarded(entry):
            message = "a guarded branch after one without a guard: it would never be taken"
            report.add(entry, message, key="next", hint="put `else` last")
        elif isinstance(entry, Mapping) and not {"when", "then", "else"}.isdisjoint(entry.items):
            _add_branch(report, branches, Draft(entry))
        else:
            plain = branches.otherwise if branches.guarded else branches.always
            plain.extend(_targets(report, entry, None))
    return branches


def _is_guarded(entry: Node) -> bool:
    return isinstance(entry, Mapping) and "when" in entry.items


def _add_branch(report: Report, branches: _Branches, entry: Draft) -> None:
    guard, then, otherwise = entry.take("when"), entry.take("then"), entry.take("else")
    if "step" in entry.items:
        if then is not None or otherwise is not None:
            report.add(entry.node, "`step` stands where `then` and `else` do not", key="step")
        then, overlay = entry.finished(), None
    else:
        _check_keys(report, entry)
        merged_inputs(report, entry)
        overlay = entry.take("input")
        if then is None and guard is not None:
            report.add(entry.node, "a branch with `when` needs `then`", key="then")
    if guard is not None:
        targets = [] if then is None else _targets(report, then, overlay)
        branches.guarded.append(_Branch(guard, targets))
    elif then is not None:
        branches.always.extend(_targets(report, then, overlay))
    if otherwise is not None:
        if not branches.guarded:
            report.add(entry.key("else"), "`else` without a `when` before it", key="else")
        branches.otherwise.extend(_targets(report, otherwise, overlay))


def _check_keys(report: Report, entry: Draft) -> None:
    for name in [name for name in entry.items if name not in _BRANCH_KEYS]:
        hint = suggestion(name, ("step", *_BRANCH_KEYS))
        report.add(entry.key(name), f"unknown key `{name}` in a branch", key=name, hint=hint)


def _targets(report: Report, node: Node, overlay: Node | None) -> list[Mapping]:
    nodes = node.items if isinstance(node, Sequence) else [node]
    found = [_target(report, each, overlay) for each in nodes]
    return [target for target in found if target is not None]


def _target(report: Report, node: Node, overlay: Node | None) -> Mapping | None:
    """An arc. What the target says itself goes over what its branch says."""
    if text_of(node) is not None:
        arc = empty_at(node)
        arc.put("step", node)
    elif isinstance(node, Mapping) and "step" in node.items and "when" not in node.items:
        arc = Draft(node)
        merged_inputs(report, arc)
    else:
        _refuse_target(report, node)
        return None
    if isinstance(overlay, Mapping):
        merged = Draft(overlay)
        own = arc.get("input")
        if isinstance(own, Mapping):
            Draft(own).move(own.items, merged)
        arc.put("input", merged.finished())
    return arc.finished()


def _refuse_target(report: Report, node: Node) -> None:
    if isinstance(node, Mapping) and "step" in node.items:
        hint = "put it in the `when` of the branch"
        report.add(node, "a guard inside `then` has no counterpart", key="when", hint=hint)
    else:
        report.add(node, f"a target cannot be {describe(node)}", key="next", hint=_TARGET)


def _arcs(report: Report, branches: _Branches) -> list[Mapping]:
    if branches.is_first_match():
        guarded = [
            (branch.guard, target) for branch in branches.guarded for target in branch.targets
        ]
        plain = [*branches.always, *branches.otherwise]
        return [*(_guarded(target, guard) for guard, target in guarded), *plain]
    arcs = list(branches.always)
    before: list[str] = []
    for branch in branches.guarded:
        own = _expression(report, branch.guard)
        guard = text_at(branch.guard, _denying(before, own)) if before else branch.guard
        arcs += [_guarded(target, guard) for target in branch.targets]
        before.append(own)
    for target in branches.otherwise:
        arcs.append(_guarded(target, text_at(target, _denying(before, ""))))
    return arcs


def _guarded(target: Mapping, guard: Node) -> Mapping:
    arc = Draft(target)
    arc.put("when", guard)
    return arc.finished()


def _expression(report: Report, guard: Node) -> str:
    expression = expression_of(guard)
    if expression is None:
        message = "a guard beside a branch with several targets must be one `{{ expression }}`"
        report.add(guard, message, key="when", hint='write it as "{{ ... }}"')
    return expression or "true"


def _denying(before: list[str], own: str) -> str:
    """The branch is taken where none before it is. Its own guard comes last: it may need that."""
    parts = [f"not ({each})" for each in before] + ([f"({own})"] if own else [])
    if _reads_failure(*before) and not _reads_failure(own or "true"):
        # A failed step asks only arcs whose guard looks at the failure: this one did not.
        parts.insert(0, "event.name != 'step.failed'")
    return f"{{{{ {' and '.join(parts)} }}}}"


def _reads_failure(*expressions: str) -> bool:
    try:
        return any(
            _FAILURE_ROOTS & compile_template(f"{{{{ {each} }}}}").roots for each in expressions
        )
    except TemplateError:
        return False  # Whoever compiles the guard next says what is wrong with it.
