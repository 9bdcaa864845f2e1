"""Random playbooks that always end, and what their tools answer.

    plans() ─> Plan: a Playbook built from the structs, and one Tool per step

Steps are s0, s1, ...: arcs lead to higher numbers, but for a few that lead back and are taken a
bounded number of times. Every step but the first has an arc from an earlier one. What a tool
answers is a function of step, visit, item and attempt, so a case can be run again and compared.

Templates come from a small vocabulary: compiling one costs more than a whole case.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

from hypothesis import strategies as st

from noetl_core.domain.ids import StepName
from noetl_core.domain.playbook import (
    Arc,
    FailurePolicy,
    Loop,
    LoopSpec,
    Metadata,
    Next,
    NextSpec,
    Playbook,
    Step,
    StepPolicy,
    StepSpec,
    Task,
)

_SIZES = (1, 2, 3, 4, 5, 5, 6, 6, 7)
READS_FRESH_RESULTS = True
"""Whether the broker is asked to route on results that are not in the database yet: those of a loop
that ends in the same turn, and a payload too large to ride with its message."""
RETURNS_MAX = 2
"""How often an arc that leads back is taken, in one execution."""

T = TypeVar("T")
Fails = Literal["never", "always", "first visit", "odd items", "last item", "first attempt"]


class Answer(NamedTuple):
    ok: bool
    value: dict[str, Any]
    ctx: dict[str, Any]


class Tool(NamedTuple):
    """What the tool of one step does.

    `pushes`: the values for routing fit the envelope. `is_large`: the result does not fit the
    message, so it is in a tier of its own.
    """

    fails: Fails = "never"
    flag: Literal["yes", "no", "by visit"] = "yes"
    rows: int = 2
    pushes: bool = True
    is_large: bool = False
    writes: Literal["nothing", "own", "shared"] = "nothing"

    def answer(self, step: str, *, visit: int, index: int | None, attempt: int) -> Answer:
        flag = {"yes": True, "no": False, "by visit": visit % 2 == 1}[self.flag]
        value = {
            "ok": flag,
            "rows": [f"{step}.{visit}/{row}" for row in range(self.rows)],
            "of": [visit, index],
        }
        return Answer(not self._fails(visit, index, attempt), value, self._writes(step, index))

    def _fails(self, visit: int, index: int | None, attempt: int) -> bool:
        match self.fails:
            case "never":
                return False
            case "always":
                return True
            case "first visit":
                return visit == 1
            case "odd items":
                return index is not None and index % 2 == 1
            case "last item":
                return index == 2
            case "first attempt":
                return attempt == 1

    def _writes(self, step: str, index: int | None) -> dict[str, Any]:
        match self.writes:
            case "nothing":
                return {}
            case "own":
                return {f"by.{step}": index, "by.last": step}
            case "shared":
                return {"shared": index or 0}


class Plan(NamedTuple):
    throws: bytes
    """What it was made from: two plans of the same throws are the same."""
    playbook: Playbook
    tools: dict[StepName, Tool]
    payload: dict[str, Any] | None
    is_confluent: bool
    """The order in which things happen cannot change how it ends.

    It can where parallel branches read what others write (`ctx`, results), where they meet inside a
    loop of arcs (a barrier there counts the tokens that have come so far), and where the outcome
    depends on the attempt.
    """


WORKLOAD = {"flag": True, "rows": ["a", "b", "c"], "name": "text", "shared": 1}
PAYLOADS: tuple[dict[str, Any] | None, ...] = (
    None,
    None,
    {"flag": False},
    {"rows": [{"id": 1}, {"id": 2}]},
)

_ALWAYS = None
_CALL_GUARDS = (
    *(_ALWAYS,) * 7,
    "{{ output.data.ok }}",
    "{{ not output.data.ok }}",
    "{{ output.status == 'ok' }}",
    "{{ event.name == 'call.done' }}",
    "{{ workload.flag }}",
    "{{ flag and output.data.rows | length > 1 }}",
    "{{ ctx.shared | default(0) > 1 }}",
    "{{ ctx.nowhere.to_be_found }}",
)
_LOOP_GUARDS = (
    *(_ALWAYS,) * 4,
    "{{ event.name == 'loop.done' }}",
    "{{ output.stats.failed > 0 }}",
    "{{ output.stats.success == output.stats.total }}",
    "{{ output.results | length > 1 }}",
    "{{ output.results | select | list | length == output.stats.success }}",
    "{{ ctx.shared | default(0) > 1 }}",
)
_ROUTER_GUARDS = (
    _ALWAYS,
    _ALWAYS,
    "{{ workload.flag }}",
    "{{ not flag }}",
    "no",
    "{{ ctx.shared | default(0) > 1 }}",
)
_FAILURE_GUARDS = (
    "{{ event.name == 'step.failed' }}",
    "{{ event.name == 'call.error' }}",
    "{{ error.kind == 'boom' }}",
    "{{ output.status == 'error' }}",
)
_STEP_SETS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"ctx.shared": 2},
    {"ctx.seen.status": "{{ output.status }}", "ctx.seen.at": 1},
    {"ctx.seen": {"whole": True}, "ctx.seen.part": "{{ event.step }}"},
    {"ctx.last": "{{ output }}"},
)
_ARC_SETS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    {"ctx.shared": "{{ ctx.shared | default(0) + 1 }}"},
    {"ctx.seen": {"fresh": True}},
    {"ctx.seen.part.deep": 3},
)
_COLLECTIONS: tuple[Any, ...] = (
    *("{{ workload.rows }}",) * 4,
    ["x", "y", "z"],
    ["x", "y", "z"],
    ["x", "y", "z", "p", "q"],
    ["only"],
    [],
    "{{ ctx.rows | default([]) }}",
    "{{ range(3) }}",
    "{{ workload.name }}",
    "{{ nowhere }}",
)
_SHARED = "ctx.shared"

_BACK_GUARD = "{{{{ ctx.back_{0} | default(0) < {1} }}}}"
_BACK_COUNT = "{{{{ ctx.back_{0} | default(0) + 1 }}}}"

_FAILS: tuple[Fails, ...] = (
    *("never",) * 9,
    *("always", "first visit", "odd items", "last item", "first attempt"),
)
_FLAGS: tuple[Literal["yes", "no", "by visit"], ...] = ("yes", "yes", "no", "by visit")
_WRITES: tuple[Literal["nothing", "own", "shared"], ...] = ("nothing", "nothing", "own", "shared")
_KINDS = ("call", "call", "call", "loop", "loop", "router")
_JOINS: tuple[Literal["any", "all"] | None, ...] = (None, None, None, None, "any", "all")
_LOOP_MODES: tuple[Literal["sequential", "parallel"], ...] = ("sequential", "parallel", "parallel")
_POLICIES: tuple[Literal["fail_fast", "best_effort"], ...] = ("fail_fast", "best_effort")
_MODES: tuple[Literal["exclusive", "inclusive"], ...] = ("exclusive", "inclusive")
_NO_MATCH: tuple[Literal["complete", "fail"], ...] = ("complete", "complete", "complete", "fail")


class Dice:
    """Choices out of one string of bytes: a draw of Hypothesis costs as much as a whole step.

    A zero is the first choice, and what is left out is zero, so bytes shrink to simple plans.
    """

    def __init__(self, throws: bytes) -> None:
        self._throws = iter(throws)

    def below(self, limit: int) -> int:
        return next(self._throws, 0) % limit

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def of(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def chance(self, of_six: int) -> bool:
        return self.below(6) >= 6 - of_six


THROWS = 128


def plans() -> st.SearchStrategy[Plan]:
    return st.binary(min_size=THROWS, max_size=THROWS).map(plan_of)


@lru_cache(maxsize=64)
def plan_of(throws: bytes) -> Plan:
    """Hypothesis tries a playbook in several ways: what is computed once for it, is kept."""
    dice = Dice(throws)
    size = dice.of(_SIZES)
    kinds = [dice.of(_KINDS) for _ in range(size)]
    targets = _targets(dice, size)
    steps = {
        StepName(f"s{number}"): _step(dice, number, kinds, targets[number])
        for number in range(size)
    }
    playbook = Playbook(metadata=Metadata(name="random"), workload=WORKLOAD, steps=steps)
    tools = {name: _tool(dice) for name, step in steps.items() if step.tool}
    return Plan(throws, playbook, tools, dice.of(PAYLOADS), _is_confluent(playbook, tools))


def _tool(dice: Dice) -> Tool:
    return Tool(
        fails=dice.of(_FAILS),
        flag=dice.of(_FLAGS),
        rows=dice.below(4),
        pushes=dice.chance(3),
        is_large=dice.chance(1) and READS_FRESH_RESULTS,
        writes=dice.of(_WRITES),
    )


def _targets(dice: Dice, size: int) -> list[list[int]]:
    """Where the arcs of each step lead: forward, with every step reached; sometimes back."""
    targets: list[list[int]] = [[] for _ in range(size)]
    for number in range(1, size):
        targets[dice.between(max(0, number - 3), number - 1)].append(number)
    if size > 1:
        for _ in range(dice.below(4)):
            source = dice.between(0, size - 2)
            targets[source].append(dice.between(source + 1, size - 1))
        if dice.chance(2):
            source = dice.between(0, size - 1)
            targets[source].insert(0, dice.between(0, source))
    return targets


def _step(dice: Dice, number: int, kinds: list[str], targets: list[int]) -> Step:
    kind = kinds[number]
    if kind == "router" and not targets:
        kind = "call"
    return Step(
        step=StepName(f"s{number}"),
        spec=StepSpec(
            join=dice.of(_JOINS),
            policy=StepPolicy(failure=FailurePolicy(mode=dice.of(_POLICIES))),
        ),
        loop=_loop(dice, number, kinds) if kind == "loop" else None,
        tool=() if kind == "router" else (Task(label="task_0", kind="noop"),),
        set=dice.of(_STEP_SETS),
        next=_next(dice, number, kind, targets),
    )


def _loop(dice: Dice, number: int, kinds: list[str]) -> Loop:
    collection = dice.of(_COLLECTIONS)
    if number > 0 and dice.chance(3):
        other = dice.between(max(0, number - 2), number - 1)
        field = {"call": "data.rows", "loop": "results", "router": "data"}[kinds[other]]
        if READS_FRESH_RESULTS or field != "results":
            collection = f"{{{{ s{other}.{field} }}}}"
    spec = LoopSpec(mode=dice.of(_LOOP_MODES), max_in_flight=dice.between(1, 3))
    return Loop(collection=collection, spec=spec)


def _next(dice: Dice, number: int, kind: str, targets: list[int]) -> Next:
    guards = {"call": _CALL_GUARDS, "loop": _LOOP_GUARDS, "router": _ROUTER_GUARDS}[kind]
    arcs = [
        _arc(dice, target, guards) if target > number else _back_arc(dice, number, target)
        for target in targets
    ]
    if kind != "router" and targets and targets[-1] > number and dice.chance(3):
        arcs.append(_arc(dice, targets[-1], _FAILURE_GUARDS))
    return Next(
        spec=NextSpec(mode=dice.of(_MODES), on_no_match=dice.of(_NO_MATCH)), arcs=tuple(arcs)
    )


def _arc(dice: Dice, target: int, guards: Sequence[str | None]) -> Arc:
    when = dice.of(_FAILURE_GUARDS if dice.chance(1) else guards)
    return Arc(step=StepName(f"s{target}"), when=when, set=dice.of(_ARC_SETS))


def _back_arc(dice: Dice, number: int, target: int) -> Arc:
    return Arc(
        step=StepName(f"s{target}"),
        when=_BACK_GUARD.format(number, dice.between(1, RETURNS_MAX)),
        set={f"ctx.back_{number}": _BACK_COUNT.format(number)},
    )


def _is_confluent(playbook: Playbook, tools: dict[StepName, Tool]) -> bool:
    steps = playbook.steps.values()
    if any(tool.fails == "first attempt" for tool in tools.values()):
        return False
    reads_shared = any(_SHARED in (arc.when or "") for step in steps for arc in step.next.arcs)
    if reads_shared and any(
        step.loop is not None and tools[step.step].writes == "shared" for step in steps
    ):
        return False
    if not any(s.next.spec.mode == "inclusive" and len(s.next.arcs) > 1 for s in steps):
        return True
    goes_back = any(int(arc.step[1:]) <= int(s.step[1:]) for s in steps for arc in s.next.arcs)
    reads_others = any(s.loop is not None and "{{ s" in str(s.loop.collection) for s in steps)
    return not (goes_back or reads_shared or reads_others)
