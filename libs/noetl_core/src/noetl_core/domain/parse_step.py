"""One step of the workflow, from its node to the model."""

import re
from typing import Any

import msgspec

from noetl_core.domain.analysis import ROOTS, task_field
from noetl_core.domain.ids import StepName
from noetl_core.domain.parse_tool import (
    Places,
    action_set,
    check_jumps,
    read_rules,
    read_set,
    read_task,
    rule_nodes,
    task_nodes,
)
from noetl_core.domain.playbook import (
    MAX_IN_FLIGHT_DEFAULT,
    POOL_DEFAULT,
    Arc,
    FailurePolicy,
    Loop,
    LoopSpec,
    Next,
    NextSpec,
    Step,
    StepPolicy,
    StepSpec,
)
from noetl_core.domain.reader import Fields, Report, guard_text
from noetl_core.domain.template import GLOBAL_NAMES, is_template
from noetl_core.domain.yaml_tree import Mapping, Node, Scalar, data_of

MAX_IN_FLIGHT_MAX = 10_000
PRIORITY_MAX = 1_000_000
STEP_NAME_LENGTH_MAX = 128

RESERVED_NAMES = ROOTS | GLOBAL_NAMES | {"self", "true", "false", "none", "True", "False", "None"}
"""What a step or an iterator may not be called: templates mean something else by it."""

_STEP_KEYS = ("step", "desc", "spec", "input", "loop", "tool", "set", "next")
_STEP_KEYS_LATER = ("retry", "sink", "output")
_NEXT_SHAPE = "write `next: {arcs: [{step: NAME}]}`"
_POOL = re.compile(r"[A-Za-z0-9_-]{1,64}")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def step_name(report: Report, node: Node) -> StepName | None:
    """The name, if it is one that the rest of the playbook can use."""
    found = node.items.get("step") if isinstance(node, Mapping) else None
    if not isinstance(found, Scalar) or not isinstance(found.value, str) or not found.value:
        return None
    name = found.value
    if name in RESERVED_NAMES:
        message = f"a step may not be called `{name}`: templates use that name"
        report.add(found, message, key="step")
    if len(name) > STEP_NAME_LENGTH_MAX or not name.isprintable():
        message = f"a step's name has up to {STEP_NAME_LENGTH_MAX} printable characters"
        report.add(found, message, key="step")
    return StepName(name)


def read_step(report: Report, places: Places, node: Node, timeout_s: float | None) -> Step:
    """`timeout_s` is what holds for tasks that name no timeout."""
    fields = Fields(report, node, what="a step", known=_STEP_KEYS, later=_STEP_KEYS_LATER)
    return _StepReader(report, places, fields).read(timeout_s)


class _StepReader:
    """`places` remembers the nodes that a check of the whole playbook may point at."""

    def __init__(self, report: Report, places: Places, fields: Fields) -> None:
        self._report = report
        self._places = places
        self._fields = fields
        self._name = StepName(fields.required_text("step"))
        places[self._name, ""] = fields.node

    def read(self, timeout_s: float | None) -> Step:
        fields = self._fields
        spec = fields.section(
            "spec",
            known=("timeout", "pool", "join", "priority", "policy"),
            later=("loop_mode", "fanout"),
        )
        policy = spec.section("policy", known=("failure", "rules"), later=("admit",))
        for name in ("input", "set"):
            self._remember(name, fields.get(name))
        step = Step(
            step=self._name,
            desc=fields.text("desc"),
            spec=self._spec(spec, policy),
            input=fields.data("input"),
            loop=self._loop(),
            set=read_set(fields, "set", roots=("ctx",)),
            next=self._next(),
        )
        return self._with_tool(step, policy, timeout_s)

    def _spec(self, spec: Fields, policy: Fields) -> StepSpec:
        failure = policy.section("failure", known=("mode",))
        pool = spec.text("pool", POOL_DEFAULT)
        if not _POOL.fullmatch(pool):
            spec.wrong("pool", "a name of letters, digits, `-` and `_`")
        return StepSpec(
            timeout_s=spec.seconds("timeout"),
            pool=pool,
            join=spec.choice("join", None, StepSpec),
            priority=spec.whole("priority", 0, at_least=-PRIORITY_MAX, at_most=PRIORITY_MAX),
            policy=StepPolicy(
                failure=FailurePolicy(mode=failure.choice("mode", "fail_fast", FailurePolicy))
            ),
        )

    def _loop(self) -> Loop | None:
        if self._fields.get("loop") is None:
            return None
        fields = self._fields.section("loop", known=("in", "iterator", "spec"), later=("cursor",))
        spec = fields.section(
            "spec", known=("mode", "max_in_flight"), later=("chunk_size", "frame")
        )
        iterator = fields.text("iterator", "item")
        if not _IDENTIFIER.fullmatch(iterator) or iterator in RESERVED_NAMES:
            fields.wrong("iterator", "a name that templates do not use themselves")
        return Loop(
            collection=self._collection(fields),
            iterator=iterator,
            spec=LoopSpec(
                mode=spec.choice("mode", "parallel", LoopSpec, later=("fanout", "cursor")),
                max_in_flight=spec.whole(
                    "max_in_flight", MAX_IN_FLIGHT_DEFAULT, at_least=1, at_most=MAX_IN_FLIGHT_MAX
                ),
            ),
        )

    def _collection(self, loop: Fields) -> Any:
        node = loop.get("in")
        self._remember("loop.in", node)
        if node is None:
            if not loop.has("cursor"):
                loop.missing("in")
            return []
        value = data_of(node)
        if not isinstance(value, list) and not is_template(value):
            loop.wrong("in", "a list, or a template that gives one")
        return value

    def _next(self) -> Next:
        node = self._fields.get("next")
        if node is not None and not isinstance(node, Mapping):
            self._fields.wrong("next", "a mapping", hint=_NEXT_SHAPE)
            return Next()
        fields = self._fields.section("next", known=("spec", "arcs"))
        spec = fields.section("spec", known=("mode", "on_no_match"))
        arcs = fields.items("arcs", hint=_NEXT_SHAPE)
        return Next(
            spec=NextSpec(
                mode=spec.choice("mode", "exclusive", NextSpec),
                on_no_match=spec.choice("on_no_match", "complete", NextSpec),
            ),
            arcs=tuple(self._arc(arc, number) for number, arc in enumerate(arcs)),
        )

    def _arc(self, node: Node, number: int) -> Arc:
        fields = Fields(
            self._report, node, what="an arc", known=("step", "when", "set"), later=("on", "input")
        )
        for name in ("step", "when", "set"):
            self._remember(f"next.arcs[{number}].{name}", fields.get(name) or node)
        return Arc(
            step=StepName(fields.required_text("step")),
            when=guard_text(fields, "when"),
            set=read_set(fields, "set", roots=("ctx",)),
        )

    def _with_tool(self, step: Step, policy: Fields, timeout_s: float | None) -> Step:
        """Rules of the step hold for each of its tasks that has none of its own."""
        nodes = task_nodes(self._report, self._fields.get("tool"))
        rules = tuple(read_rules(policy))
        tasks = tuple(read_task(self._report, node, rules, timeout_s) for node in nodes)
        step = msgspec.structs.replace(step, tool=tasks)
        for node, task in zip(nodes, tasks, strict=True):
            self._remember_task(task_field(step, task), node.node, policy)
        check_jumps(self._report, tasks, self._places, step)
        return step

    def _remember_task(self, field: str, node: Mapping, policy: Fields) -> None:
        self._remember(field, node)
        for name in ("input", "set"):
            self._remember(f"{field}.{name}", node.items.get(name))
        for number, rule in enumerate(rule_nodes(node) or policy.items("rules")):
            place = f"{field}.spec.policy.rules[{number}]"
            self._remember(place, rule)
            when = rule.items.get("when") if isinstance(rule, Mapping) else None
            self._remember(f"{place}.when", when)
            self._remember(f"{place}.then.set", action_set(rule))

    def _remember(self, field: str, node: Node | None) -> None:
        if node is not None:
            self._places.setdefault((self._name, field), node)
