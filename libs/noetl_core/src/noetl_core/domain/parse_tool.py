"""The tasks of a step: three shapes of a task, two shapes of a policy rule, one model."""

from typing import Any

import msgspec

from noetl_core.domain.analysis import ROOTS, task_field
from noetl_core.domain.playbook import RETRY_ATTEMPTS_DEFAULT, Action, Rule, Step, Task
from noetl_core.domain.reader import NOT_YET, Fields, Report, guard_text, suggestion
from noetl_core.domain.tools import KINDS_TO_COME, TASK_FIELDS, TOOLS, ToolFields, is_plugin_kind
from noetl_core.domain.yaml_tree import Mapping, Node, Scalar, Sequence, data_of, describe

ATTEMPTS_MAX = 1000
TASKS_MAX = 1000
JUMP_BACK = "previous"

Places = dict[tuple[str, str], Node]
"""Where each value that may hold templates stands, by step and field."""


Workbook = dict[str, "Task"]
"""The reusable tasks of a playbook, by name."""


class TaskNode:
    """A task whose shape is known but whose fields are not read yet."""

    def __init__(self, node: Mapping, label: str) -> None:
        self.node = node
        self.label = label


def task_nodes(report: Report, node: Node | None) -> list[TaskNode]:
    """The tasks under `tool`, each with its label."""
    if node is None:
        return []
    nodes = node.items if isinstance(node, Sequence) else [node]
    if not nodes or len(nodes) > TASKS_MAX:
        report.add(node, f"a pipeline has 1 to {TASKS_MAX} tasks", key="tool")
    found = [_task_node(report, each, number) for number, each in enumerate(nodes)]
    tasks = [task for task in found if task is not None]
    seen: set[str] = set()
    for task in tasks:
        if task.label in seen:
            message = f"the task `{task.label}` is here twice: labels are unique in a step"
            report.add(task.node, message, key="name")
        seen.add(task.label)
    return tasks


def _task_node(report: Report, node: Node, number: int) -> TaskNode | None:
    """`{name: x, kind: y}`, `{kind: y}` or `{x: {kind: y}}`."""
    if not isinstance(node, Mapping):
        kind = node.text if isinstance(node, Scalar) else "KIND"
        hint = f"write `tool: {{kind: {kind}}}`"
        report.add(node, f"a task must be a mapping, not {describe(node)}", key="tool", hint=hint)
        return None
    label = f"task_{number}"
    if "kind" not in node.items and len(node.items) == 1:
        (only, inner), *_ = node.items.items()
        if isinstance(inner, Mapping) and only not in TASK_FIELDS:
            return TaskNode(inner, _checked_label(report, node.keys[only], only))
    name = node.items.get("name")
    if isinstance(name, Scalar) and name.value is not None:
        label = _checked_label(report, name, name.text)
    return TaskNode(node, label)


def _checked_label(report: Report, node: Node, label: str) -> str:
    if label in ROOTS:
        message = f"a task may not be called `{label}`: templates use that name"
        report.add(node, message, key="name")
    return label


def read_task(
    report: Report,
    task: TaskNode,
    rules: tuple[Rule, ...],
    timeout_s: float | None,
    workbook: Workbook,
) -> Task:
    """`rules` and `timeout_s` are what holds for tasks that say nothing of their own."""
    read = _read_task(report, task, rules, timeout_s)
    return _from_workbook(report, task, read, workbook) if read.kind == "workbook" else read


def _from_workbook(report: Report, node: TaskNode, task: Task, workbook: Workbook) -> Task:
    """The named task with this one's input, `set` and rules over its own."""
    name = node.node.items.get("name")
    wanted = name.text if isinstance(name, Scalar) else ""
    found = workbook.get(wanted)
    if found is None:
        message = (
            f"`{wanted}` is no task of the workbook" if wanted else "a workbook task needs `name`"
        )
        report.add(name or node.node, message, key="name", hint=suggestion(wanted, workbook))
        return task
    return msgspec.structs.replace(
        found,
        label=task.label,
        input={**found.input, **task.input},
        set={**found.set, **task.set},
        rules=task.rules or found.rules,
        timeout_s=task.timeout_s if task.timeout_s is not None else found.timeout_s,
    )


def read_workbook(report: Report, nodes: list[Node], timeout_s: float | None) -> Workbook:
    workbook: Workbook = {}
    for node in nodes:
        fields = Fields(report, node, what="a workbook entry", known=("name", "desc", "tool"))
        name = fields.required_text("name")
        tasks = task_nodes(report, fields.get("tool"))
        if fields.get("tool") is None:
            fields.missing("tool")
        if len(tasks) > 1:
            report.add(node, f"the workbook task `{name}` has one tool, not a list", key="tool")
        if name in workbook:
            report.add(node, f"the workbook has the task `{name}` already", key="name")
        if tasks:
            workbook[name] = _read_task(report, tasks[0], (), timeout_s)
    return workbook


def _read_task(
    report: Report, task: TaskNode, rules: tuple[Rule, ...], timeout_s: float | None
) -> Task:
    kind, tool = _kind(report, task.node)
    fields = Fields(
        report,
        task.node,
        what=f"a task of kind `{kind}`" if tool else "a task",
        known=(*TASK_FIELDS, *(tool.fields if tool else task.node.items)),
    )
    if tool and tool.one_of:
        _check_one_of(fields, task.node, tool)
    spec = fields.section("spec", known=("policy", "timeout"))
    policy = spec.section("policy", known=("rules",))
    own_rules = tuple(read_rules(policy))
    return Task(
        label=task.label,
        kind=kind,
        config=_config(task.node),
        input=fields.data("input"),
        set=read_set(fields, "set", roots=("ctx", "iter")),
        rules=own_rules or rules,
        timeout_s=fields.seconds("timeout", spec.seconds("timeout", timeout_s)),
    )


def _kind(report: Report, node: Mapping) -> tuple[str, ToolFields | None]:
    found = node.items.get("kind")
    if found is None:
        report.add(node, "a task needs `kind`", key="kind", hint=suggestion("", TOOLS))
        return "", None
    kind = found.text if isinstance(found, Scalar) else ""
    if kind in KINDS_TO_COME:
        report.add(found, f"the tool `{kind}` {NOT_YET}", key="kind")
    elif kind not in TOOLS and not is_plugin_kind(kind):
        hint = suggestion(kind, TOOLS)
        report.add(found, f"unknown tool kind `{kind}`", key="kind", hint=hint)
    return kind, TOOLS.get(kind)


def _check_one_of(fields: Fields, node: Mapping, tool: ToolFields) -> None:
    given = [name for name in tool.one_of if fields.get(name) is not None]
    if not given:
        fields.missing("` or `".join(tool.one_of))
    elif len(given) > 1:
        message = f"{fields.what} takes one of {', '.join(f'`{name}`' for name in given)}"
        fields.report.add(node.keys[given[1]], message, key=given[1])


def _config(node: Mapping) -> dict[str, Any]:
    return {k: data_of(v) for k, v in node.items.items() if k not in TASK_FIELDS}


def read_set(fields: Fields, name: str, *, roots: tuple[str, ...]) -> dict[str, Any]:
    """`{ctx.total: ...}`: each key says whether it is the execution's or the iteration's."""
    values = fields.data(name)
    node = fields.get(name)
    for key in values:
        root, *rest = key.split(".")
        if root in roots and rest and all(rest):
            continue
        assert isinstance(node, Mapping), node
        allowed = " or ".join(f"`{each}.NAME`" for each in roots)
        message = f"`{key}` cannot be set: write {allowed}"
        fields.report.add(node.keys[key], message, key=key, hint=_set_hint(key, roots))
    return values


def _set_hint(key: str, roots: tuple[str, ...]) -> str:
    root = key.split(".", maxsplit=1)[0]
    if root == "iter" and root not in roots:
        return "what is private to an iteration is set in a task"
    return "" if root in roots or not key else f"did you mean `ctx.{key}`?"


def read_rules(policy: Fields) -> list[Rule]:
    nodes = policy.items("rules")
    rules = [_rule(policy.report, node) for node in nodes]
    for number, rule in enumerate(rules[:-1]):
        if rule.when is None:
            message = "no rule after this one is ever reached: it has no `when`"
            policy.report.add(nodes[number], message, key="else", severity="warning")
    return rules


def _rule(report: Report, node: Node) -> Rule:
    fields = Fields(report, node, what="a rule", known=("when", "then", "else"))
    if fields.get("else") is None:
        return Rule(when=guard_text(fields, "when"), then=_action(_action_fields(fields, "then")))
    if fields.get("when") is not None or fields.get("then") is not None:
        message = "`else` stands alone: a rule has `when` and `then`, or `else`"
        report.add(node, message, key="else")
    return Rule(then=_action(_action_fields(fields, "else")))


def rule_nodes(task: Mapping) -> list[Node]:
    """The rules of a task, as they stand in the document."""
    node: Node | None = task
    for name in ("spec", "policy", "rules"):
        node = node.items.get(name) if isinstance(node, Mapping) else None
    return node.items if isinstance(node, Sequence) else []


def action_set(rule: Node) -> Node | None:
    """The `set` of a rule, whatever shape it has."""
    node: Node | None = rule
    for name in ("else", "then"):
        if isinstance(node, Mapping):
            node = node.items.get(name, node)
    return node.items.get("set") if isinstance(node, Mapping) else None


_ACTION_KEYS = ("do", "attempts", "delay", "backoff", "to", "set")


def _action_fields(rule: Fields, name: str) -> Fields:
    """`{then: {do: ...}}`, `{else: {do: ...}}` and `{else: {then: {do: ...}}}`."""
    node = rule.get(name)
    if node is None:
        rule.missing("then")
    if name == "else" and isinstance(node, Mapping) and "then" in node.items:
        return rule.section("else", known=("then",)).section("then", known=_ACTION_KEYS)
    return rule.section(name, known=_ACTION_KEYS)


def _action(fields: Fields) -> Action:
    action = Action(
        do=fields.choice("do", "continue", Action),
        attempts=fields.whole("attempts", RETRY_ATTEMPTS_DEFAULT, at_least=1, at_most=ATTEMPTS_MAX),
        delay=fields.seconds("delay") or 0.0,
        backoff=fields.choice("backoff", "fixed", Action),
        to=fields.text("to") or None,
        set=read_set(fields, "set", roots=("ctx", "iter")),
    )
    if action.do == "jump" and action.to is None:
        fields.missing("to")
    return action


def check_jumps(report: Report, tasks: tuple[Task, ...], places: Places, step: Step) -> None:
    labels = [task.label for task in tasks]
    for task in tasks:
        for number, rule in enumerate(task.rules):
            target = rule.then.to
            if target is None or target == JUMP_BACK or target in labels:
                continue
            field = f"{task_field(step, task)}.spec.policy.rules[{number}]"
            message = f"`to: {target}` names no task of this step"
            hint = suggestion(target, [*labels, JUMP_BACK])
            report.add(places[step.step, field], message, key="to", hint=hint)
