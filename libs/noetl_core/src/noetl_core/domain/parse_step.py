"""One step of the workflow, from its node to the model."""

import re
from typing import Any, Literal, NamedTuple

import msgspec

from noetl_core.domain.analysis import ROOTS, task_field
from noetl_core.domain.ids import StepName
from noetl_core.domain.parse_call import read_output, read_retry, read_sink
from noetl_core.domain.parse_tool import (
    Places,
    Workbook,
    action_set,
    check_jumps,
    read_rules,
    read_set,
    read_task,
    rule_nodes,
    task_nodes,
)
from noetl_core.domain.playbook import (
    CURSOR_SLOTS_DEFAULT,
    FANOUT_WINDOW_DEFAULT,
    MAX_IN_FLIGHT_DEFAULT,
    PLACEMENT_WAIT_DEFAULT,
    POOL_DEFAULT,
    SHARD_RETRIES_DEFAULT,
    AdmitRule,
    Arc,
    Cursor,
    ExecutorSpec,
    FailurePolicy,
    Fanout,
    Frame,
    Loop,
    LoopMode,
    LoopSpec,
    Next,
    NextSpec,
    Placement,
    Step,
    StepPolicy,
    StepSpec,
    Task,
)
from noetl_core.domain.reader import Fields, Report, guard_text
from noetl_core.domain.template import GLOBAL_NAMES, is_template
from noetl_core.domain.tools import PARKED_KINDS
from noetl_core.domain.workers import LABEL_NAME, LABEL_VALUE, POOL_NAME
from noetl_core.domain.yaml_tree import Mapping, Node, Scalar, data_of

MAX_IN_FLIGHT_MAX = 10_000
PRIORITY_MAX = 1_000_000
STEP_NAME_LENGTH_MAX = 128

RESERVED_NAMES = ROOTS | GLOBAL_NAMES | {"self", "true", "false", "none", "True", "False", "None"}
"""What a step or an iterator may not be called: templates mean something else by it."""

CHUNK_SIZE_MAX = 100_000
FRAME_ROWS_MAX = 10_000
SHARD_RETRIES_MAX = 100

_STEP_KEYS = (
    *("step", "desc", "spec", "input", "loop", "tool", "retry", "sink", "output", "set", "next"),
)
_NEXT_SHAPE = "write `next: {arcs: [{step: NAME}]}`"
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


class Context(NamedTuple):
    """What the rest of the playbook says about each of its steps."""

    executor: ExecutorSpec
    workbook: Workbook


def read_step(report: Report, places: Places, node: Node, context: Context) -> Step:
    fields = Fields(report, node, what="a step", known=_STEP_KEYS)
    return _StepReader(report, places, fields, context).read()


class _StepReader:
    """`places` remembers the nodes that a check of the whole playbook may point at."""

    def __init__(self, report: Report, places: Places, fields: Fields, context: Context) -> None:
        self._report = report
        self._places = places
        self._fields = fields
        self._context = context
        self._name = StepName(fields.required_text("step"))
        places[self._name, ""] = fields.node

    def read(self) -> Step:
        fields = self._fields
        spec = fields.section(
            "spec",
            known=(
                *("timeout", "pool", "join", "priority", "policy", "loop_mode", "fanout"),
                "placement",
            ),
        )
        policy = spec.section("policy", known=("failure", "rules", "admit"))
        for name in ("input", "set", "retry", "sink"):
            self._remember(name, fields.get(name))
        step = Step(
            step=self._name,
            desc=fields.text("desc"),
            spec=self._spec(spec, policy),
            input=fields.data("input"),
            loop=self._loop(spec),
            retry=read_retry(fields),
            sink=read_sink(fields),
            output=read_output(fields),
            set=read_set(fields, "set", roots=("ctx",)),
            next=self._next(),
        )
        return self._with_tool(step, policy)

    def _spec(self, spec: Fields, policy: Fields) -> StepSpec:
        failure = policy.section("failure", known=("mode",))
        pool = spec.text("pool", POOL_DEFAULT)
        if not POOL_NAME.fullmatch(pool):
            spec.wrong("pool", "a name of letters, digits, `-` and `_`")
        return StepSpec(
            timeout_s=spec.seconds("timeout"),
            pool=pool,
            join=spec.choice("join", None, StepSpec),
            priority=spec.whole("priority", 0, at_least=-PRIORITY_MAX, at_most=PRIORITY_MAX),
            policy=StepPolicy(
                failure=FailurePolicy(mode=failure.choice("mode", "fail_fast", FailurePolicy)),
                admit=self._admit(policy),
            ),
            fanout=self._fanout(spec),
            placement=self._placement(spec),
        )

    def _placement(self, spec: Fields) -> Placement | None:
        if spec.get("placement") is None:
            return None
        names = ("labels", "worker", "affinity", "wait")
        fields = spec.section("placement", known=names)
        for name in ("worker", "affinity"):
            self._remember(f"spec.placement.{name}", fields.get(name))
        if fields.get("worker") is not None and fields.get("affinity") is not None:
            hint = "`worker` names the one that is meant, `affinity` a key that finds one"
            message = "`placement` has either `worker` or `affinity`"
            self._report.add(fields.node, message, key="affinity", hint=hint)
        wait_s = fields.seconds("wait", PLACEMENT_WAIT_DEFAULT)
        return Placement(
            labels=_labels(fields),
            worker=fields.text("worker") or None,
            affinity=fields.text("affinity") or None,
            wait_s=PLACEMENT_WAIT_DEFAULT if wait_s is None else wait_s,
        )

    def _fanout(self, spec: Fields) -> Fanout:
        fields = spec.section("fanout", known=("max_shard_retries", "fail_fast", "allow_partial"))
        return Fanout(
            max_shard_retries=fields.whole(
                "max_shard_retries", SHARD_RETRIES_DEFAULT, at_least=0, at_most=SHARD_RETRIES_MAX
            ),
            fail_fast=fields.flag("fail_fast", default=False),
            allow_partial=fields.flag("allow_partial", default=True),
        )

    def _admit(self, policy: Fields) -> tuple[AdmitRule, ...]:
        nodes = policy.section("admit", known=("rules",)).items("rules")
        return tuple(self._admit_rule(node, number) for number, node in enumerate(nodes))

    def _admit_rule(self, node: Node, number: int) -> AdmitRule:
        """`{when, then: {allow}}`, `{else: {allow}}` or `{else: {then: {allow}}}`."""
        fields = Fields(
            self._report, node, what="an admission rule", known=("when", "then", "else")
        )
        self._remember(f"spec.policy.admit.rules[{number}].when", fields.get("when") or node)
        name = "then" if fields.get("else") is None else "else"
        if fields.get(name) is None:
            fields.missing("then")
        then = fields.section(name, known=("allow", "then"))
        if then.get("then") is not None:
            then = then.section("then", known=("allow",))
        return AdmitRule(when=guard_text(fields, "when"), allow=then.flag("allow", default=True))

    def _loop(self, step_spec: Fields) -> Loop | None:
        mode = step_spec.choice("loop_mode", self._context.executor.loop_mode, ExecutorSpec)
        if self._fields.get("loop") is None:
            return None
        fields = self._fields.section("loop", known=("in", "iterator", "spec", "cursor"))
        iterator = fields.text("iterator", "item")
        if not _IDENTIFIER.fullmatch(iterator) or iterator in RESERVED_NAMES:
            fields.wrong("iterator", "a name that templates do not use themselves")
        cursor = self._cursor(fields)
        return Loop(
            collection=None if cursor is not None else self._collection(fields),
            cursor=cursor,
            iterator=iterator,
            spec=self._loop_spec(fields, mode, is_cursor=cursor is not None),
        )

    def _loop_spec(self, loop: Fields, default: LoopMode, *, is_cursor: bool) -> LoopSpec:
        fields = loop.section("spec", known=("mode", "max_in_flight", "chunk_size", "frame"))
        by_default: Literal["sequential", "parallel", "fanout", "cursor"]
        by_default = "cursor" if is_cursor else default
        mode = fields.choice("mode", by_default, LoopSpec)
        if (mode == "cursor") != is_cursor:
            loop.missing("in" if is_cursor else "cursor")
        in_flight = _WINDOWS.get(mode, MAX_IN_FLIGHT_DEFAULT)
        chunk_size = fields.whole("chunk_size", 0, at_least=1, at_most=CHUNK_SIZE_MAX)
        return LoopSpec(
            mode=mode,
            max_in_flight=fields.whole(
                "max_in_flight", in_flight, at_least=1, at_most=MAX_IN_FLIGHT_MAX
            ),
            chunk_size=chunk_size or None,
            frame=_frame(fields),
        )

    def _cursor(self, loop: Fields) -> Cursor | None:
        if loop.get("cursor") is None:
            return None
        fields = loop.section("cursor", known=("kind", "auth", "claim"))
        self._remember("loop.cursor", fields.node)
        auth = fields.get("auth")
        return Cursor(
            kind=fields.choice("kind", "postgres", Cursor),
            auth=None if auth is None else data_of(auth),
            claim=fields.required_text("claim"),
        )

    def _collection(self, loop: Fields) -> Any:
        node = loop.get("in")
        self._remember("loop.in", node)
        if node is None:
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
        names = ("step", "when", "set", "on", "input")
        fields = Fields(self._report, node, what="an arc", known=names)
        for name in names:
            self._remember(f"next.arcs[{number}].{name}", fields.get(name) or node)
        return Arc(
            step=StepName(fields.required_text("step")),
            when=guard_text(fields, "when"),
            on=fields.choice("on", None, Arc),
            set=read_set(fields, "set", roots=("ctx",)),
            input=fields.data("input"),
        )

    def _with_tool(self, step: Step, policy: Fields) -> Step:
        """Rules of the step hold for each of its tasks that has none of its own."""
        nodes = task_nodes(self._report, self._fields.get("tool"))
        rules = tuple(read_rules(policy))
        timeout_s = self._context.executor.policy.defaults.timeout_s
        tasks = tuple(
            read_task(self._report, node, rules, timeout_s, self._context.workbook)
            for node in nodes
        )
        step = msgspec.structs.replace(step, tool=tasks)
        for node, task in zip(nodes, tasks, strict=True):
            self._remember_task(task_field(step, task), node.node, policy)
            self._check_parked(node.node, task, step)
        check_jumps(self._report, tasks, self._places, step)
        self._check_chunks(step)
        return step

    def _check_chunks(self, step: Step) -> None:
        streams = any(task.config.get("chunk_size") is not None for task in step.tool)
        for number, arc in enumerate(step.next.arcs):
            if arc.on is not None and (not streams or (step.loop and step.loop.cursor)):
                place = self._places[self._name, f"next.arcs[{number}].on"]
                message = f"`on: {arc.on}` is never taken: no task of this step has a `chunk_size`"
                if streams:
                    message = f"`on: {arc.on}` is never taken: a cursor loop sends no chunks"
                self._report.add(place, message, key="on", severity="warning")

    def _check_parked(self, node: Mapping, task: Task, step: Step) -> None:
        """What waits has no worker, so there is nobody to do more than wait."""
        if task.kind not in PARKED_KINDS:
            return
        wrong = {
            "`{}` waits without a worker, so it is the only task of its step": len(step.tool) > 1,
            "a step of kind `{}` has no `sink`": step.sink is not None,
            "a step of kind `{}` has no `retry.on_success`": step.retry.on_success is not None,
            "a task of kind `{}` has no `set` and no rules": bool(task.set or task.rules),
            "a cursor loop has no task of kind `{}`": bool(step.loop and step.loop.cursor),
        }
        for message, is_wrong in wrong.items():
            if is_wrong:
                hint = "do that in a step of its own"
                self._report.add(node, message.format(task.kind), key="kind", hint=hint)

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


def _labels(placement: Fields) -> dict[str, str]:
    """`gpu: true` and `gpu: "true"` are the same label."""
    node = placement.get("labels")
    if node is not None and not isinstance(node, Mapping):
        placement.wrong("labels", "a mapping such as {gpu: true}")
        return {}
    labels: dict[str, str] = {}
    for name, value in (node.items if node is not None else {}).items():
        text = _label_value(value)
        if text is None or not LABEL_NAME.fullmatch(name):
            message = f"`{name}` is no label: it has a plain name and a plain value"
            hint = "a name of letters, digits, `.`, `/`, `-` and `_`, a value without `,` and `=`"
            placement.report.add(value, message, key=name, hint=hint)
        else:
            labels[name] = text
    return labels


def _label_value(node: Node) -> str | None:
    if not isinstance(node, Scalar) or node.value is None:
        return None
    text = str(node.value).lower() if isinstance(node.value, bool) else node.text
    return text if LABEL_VALUE.fullmatch(text) else None


_WINDOWS = {"fanout": FANOUT_WINDOW_DEFAULT, "cursor": CURSOR_SLOTS_DEFAULT}


def _frame(loop_spec: Fields) -> Frame:
    fields = loop_spec.section(
        "frame", known=("max_rows", "process", "row_concurrency", "lease_seconds")
    )
    return Frame(
        max_rows=fields.whole("max_rows", 50, at_least=1, at_most=FRAME_ROWS_MAX),
        process=fields.choice("process", "row", Frame),
        row_concurrency=fields.whole("row_concurrency", 1, at_least=1, at_most=FRAME_ROWS_MAX),
        lease_seconds=fields.seconds("lease_seconds", 120.0) or 120.0,
    )
