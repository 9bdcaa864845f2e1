"""Random playbooks that always end, and what their tools answer.

    plans() ─> Plan: a Playbook built from the structs, and one Tool per step

Steps are s0, s1, ...: arcs lead to higher numbers, but for a few that lead back and are taken a
bounded number of times. Every step but the first has an arc from an earlier one; `last` is the
final step, where there is one. What a tool answers is a function of step, visit, item, page and
attempt, so a case can be run again and compared.

A step may call a child: one of a few small playbooks, or the random one itself, which is not called
by itself once more (CHILDREN, World.child_of).

Templates come from a small vocabulary: compiling one costs more than a whole case.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

from hypothesis import strategies as st

from noetl_core.domain.ids import CatalogId, StepName
from noetl_core.domain.playbook import (
    AdmitRule,
    Arc,
    Circuit,
    Cursor,
    Executor,
    ExecutorSpec,
    FailurePolicy,
    Fanout,
    Loop,
    LoopSpec,
    Metadata,
    Next,
    NextSpec,
    OnError,
    OnSuccess,
    Playbook,
    Retry,
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
Fails = Literal[
    "never",
    "always",
    "first visit",
    "odd items",
    "last item",
    "first attempt",
    "first two attempts",
]
Child = Literal["one", "loops", "fails", "waits", "calls", "itself", "nowhere"]
Wait = Literal["for time", "for a signal", "for a signal in time"]

CATALOG = CatalogId(7)
"""The random playbook."""
CHILD_CATALOGS: dict[Child, CatalogId] = {
    "one": CatalogId(8),
    "loops": CatalogId(9),
    "fails": CatalogId(10),
    "waits": CatalogId(11),
    "calls": CatalogId(12),
    "itself": CATALOG,
    "nowhere": CatalogId(99),
}
APPROVERS = ("ann", "bob")


class Answer(NamedTuple):
    ok: bool
    value: dict[str, Any]
    ctx: dict[str, Any]
    frame_rows: int | None = None


class Tool(NamedTuple):
    """What the tool of one step does.

    `pushes`: the values for routing fit the envelope. `is_large`: the result does not fit the
    message, so it is in a tier of its own. `pages`: how many there are to ask for. `frames`: how
    often the cursor of the step gives rows. `chunks`: in how many pieces the result is streamed.
    """

    fails: Fails = "never"
    flag: Literal["yes", "no", "by visit"] = "yes"
    rows: int = 2
    pushes: bool = True
    is_large: bool = False
    writes: Literal["nothing", "own", "shared"] = "nothing"
    pages: int = 1
    frames: int = 2
    chunks: int = 0
    child: "Child" = "one"
    wait: "Wait" = "for time"

    def answer(
        self, step: str, *, visit: int, index: int | None, attempt: int, page: int = 1
    ) -> Answer:
        flag = {"yes": True, "no": False, "by visit": visit % 2 == 1}[self.flag]
        value = {
            "ok": flag,
            "rows": [f"{step}.{visit}@{page}/{row}" for row in range(self.rows)],
            "of": [visit, index],
            "page": page,
            "more": page < self.pages,
        }
        frame_rows = None if index is None else int(index < self.frames)
        ok = not self._fails(visit, index, attempt)
        return Answer(ok, value, self._writes(step, index), frame_rows)

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
            case "first two attempts":
                return attempt <= 2

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
    loop of arcs (a barrier there counts the tokens that have come so far), where the outcome
    depends on the attempt, and where tokens with chunks run ahead of the step they come from.
    """

    @property
    def catalog(self) -> dict[CatalogId, "Plan"]:
        """Every playbook that a case can start, itself among them."""
        return {CATALOG: self, **_CHILDREN}


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
_PAGE_GUARDS = (
    *(_ALWAYS,) * 4,
    "{{ event.name == 'retry.completed' }}",
    "{{ output.data | length > 2 }}",
    "{{ output.status == 'ok' }}",
)
_WAIT_GUARDS = (*(_ALWAYS,) * 4, "{{ output.status == 'ok' }}", "{{ workload.flag }}")
_FANIN_GUARDS = (
    *(_ALWAYS,) * 3,
    "{{ fanin.status == 'complete' }}",
    "{{ fanin.status == 'partial' }}",
    "{{ fanin.failed > 0 }}",
    "{{ event.name == 'loop.fanin.completed' }}",
    "{{ fanin.done == fanin.total }}",
    "{{ output.results | select | list | length == fanin.done }}",
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
    "{{ error.kind in ['timeout', 'denied', 'playbook_failed', 'loop_failed'] }}",
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
    *("always", "first visit", "odd items", "last item", "first attempt", "first two attempts"),
)
_FLAGS: tuple[Literal["yes", "no", "by visit"], ...] = ("yes", "yes", "no", "by visit")
_WRITES: tuple[Literal["nothing", "own", "shared"], ...] = ("nothing", "nothing", "own", "shared")
_KINDS: tuple["Kind", ...] = (
    *("call", "call", "call", "call", "loop", "loop", "loop"),
    *("fanout", "fanout", "cursor", "router", "child", "child", "wait", "approval"),
)
_CHILDREN_OF: tuple[Child, ...] = (
    *("one", "one", "loops", "loops", "fails", "waits", "calls", "itself", "nowhere"),
)
_WAITS: tuple[Wait, ...] = ("for time", "for a signal", "for a signal in time")
_JOINS: tuple[Literal["any", "all"] | None, ...] = (None, None, None, None, "any", "all")
_LOOP_MODES: tuple[Literal["sequential", "parallel"], ...] = ("sequential", "parallel", "parallel")
_POLICIES: tuple[Literal["fail_fast", "best_effort"], ...] = ("fail_fast", "best_effort")
_MODES: tuple[Literal["exclusive", "inclusive"], ...] = ("exclusive", "inclusive")
_NO_MATCH: tuple[Literal["complete", "fail"], ...] = ("complete", "complete", "complete", "fail")
_BACKOFFS: tuple[Literal["fixed", "linear", "exponential"], ...] = (
    *("exponential", "fixed", "linear"),
)
_COLLECTS: tuple[tuple[Literal["append", "replace", "collect"], str], ...] = (
    *(("append", "rows"), ("append", ""), ("collect", ""), ("replace", "")),
)
_ADMITS: tuple[tuple[AdmitRule, ...], ...] = (
    *((),) * 10,
    (AdmitRule(when="{{ workload.flag }}"), AdmitRule(allow=False)),
    (AdmitRule(allow=False),),
    (AdmitRule(when="{{ ctx.nowhere.to_be_found }}"),),
)
_ARC_INPUTS: tuple[dict[str, Any], ...] = (
    *({},) * 5,
    {"came_from": "{{ event.step }}"},
    {"came_with": "{{ output.status }}"},
)

ERROR_GUARDS: dict[str | None, bool] = {
    None: True,
    "{{ error.kind == 'boom' }}": True,
    "{{ error.kind == 'bang' }}": False,
    "{{ error.retryable }}": False,
    "{{ error.no.such.thing }}": False,
}
"""Guards of `retry.on_error`, and what they say of the error that tools of a case have."""
_WHILE_GUARDS = (
    *("{{ response.more }}",) * 2,
    "{{ response.data.more }}",
    "{{ output.data.page < 3 }}",
    "{{ response.data.no.such.thing }}",
)
_WHILE_GUARDS_OF_LOOPS = (
    *_WHILE_GUARDS,
    "{{ response.more and iter.index < 1 }}",
    "{{ response.more and not iter.last }}",
)
NEXT_CALL = {"params": {"page": "{{ response.page + 1 }}"}}

Kind = Literal["call", "loop", "fanout", "cursor", "router", "child", "wait", "approval"]
_LISTS = frozenset({"loop", "fanout"})
_LOOPS = _LISTS | {"cursor"}


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


THROWS = 320


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
    final = _final(dice, steps)
    playbook = Playbook(
        metadata=Metadata(name="random"),
        executor=Executor(
            spec=ExecutorSpec(final_step=final, timeout_s=3600.0 if dice.chance(1) else None)
        ),
        workload=WORKLOAD,
        steps=steps,
    )
    tools = {name: _tool(dice, step) for name, step in steps.items() if step.tool}
    return Plan(throws, playbook, tools, dice.of(PAYLOADS), _is_confluent(playbook, tools))


def _final(dice: Dice, steps: dict[StepName, Step]) -> str | None:
    if not dice.chance(1):
        return None
    name = StepName("last")
    steps[name] = Step(step=name, tool=(Task(label="task_0", kind="noop"),))
    return name


def _tool(dice: Dice, step: Step) -> Tool:
    has_looped = step.loop is not None
    child = dice.of(_CHILDREN_OF)
    return Tool(
        fails=dice.of(_FAILS),
        flag=dice.of(_FLAGS),
        rows=dice.below(4),
        pushes=dice.chance(3),
        is_large=dice.chance(1) and READS_FRESH_RESULTS,
        writes=dice.of(_WRITES),
        pages=dice.between(1, 4),
        frames=dice.below(4),
        chunks=dice.between(1, 3) if _streams(step) else 0,
        child="one" if has_looped and child == "itself" else child,
        wait=dice.of(_WAITS),
    )


def _streams(step: Step) -> bool:
    return any(arc.on is not None for arc in step.next.arcs)


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


def _step(dice: Dice, number: int, kinds: list[Kind], targets: list[int]) -> Step:
    kind = kinds[number]
    if kind == "router" and not targets:
        kind = "call"
    loop = _loop(dice, number, kind, kinds)
    retry = Retry() if kind == "router" else _retry(dice, kind)
    admit = dice.of(_ADMITS)
    return Step(
        step=StepName(f"s{number}"),
        spec=StepSpec(
            join=dice.of(_JOINS),
            timeout_s=60.0 if dice.chance(2) else None,
            policy=StepPolicy(failure=FailurePolicy(mode=dice.of(_POLICIES)), admit=admit),
            fanout=Fanout(
                max_shard_retries=dice.below(3),
                fail_fast=dice.chance(1),
                allow_partial=not dice.chance(2),
            ),
        ),
        loop=loop,
        tool=() if kind == "router" else (_TASKS.get(kind, _NOOP),),
        retry=retry,
        set=dice.of(_STEP_SETS),
        next=_next(dice, number, kind, targets, retry),
    )


_NOOP = Task(label="task_0", kind="noop")
_TASKS = {
    "child": Task(label="task_0", kind="playbook", config={"path": "child"}),
    "wait": Task(label="task_0", kind="wait"),
    "approval": Task(label="task_0", kind="approval"),
}


def _loop(dice: Dice, number: int, kind: Kind, kinds: list[Kind]) -> Loop | None:
    """What waits may do so in a loop as well."""
    if kind not in _LOOPS and not (kind in _TASKS and dice.chance(2)):
        return None
    in_flight = dice.between(1, 3)
    if kind == "cursor":
        spec = LoopSpec(mode="cursor", max_in_flight=in_flight)
        return Loop(cursor=Cursor(claim="take a few"), spec=spec)
    collection = dice.of(_COLLECTIONS)
    if number > 0 and dice.chance(3):
        other = dice.between(max(0, number - 2), number - 1)
        field = _RESULT_FIELDS.get(kinds[other], "data.rows")
        if kinds[other] == "child" and dice.chance(3):
            field = "results"
        if READS_FRESH_RESULTS or field != "results":
            collection = f"{{{{ s{other}.{field} }}}}"
    spec = LoopSpec(
        mode="fanout" if kind == "fanout" else dice.of(_LOOP_MODES),
        max_in_flight=in_flight,
        chunk_size=dice.between(1, 2) if dice.chance(1) else None,
    )
    return Loop(collection=collection, spec=spec)


_RESULT_FIELDS: dict[Kind, str] = {
    "loop": "results",
    "fanout": "results",
    "cursor": "results",
    "router": "data",
    "wait": "data",
    "approval": "data",
}


def _retry(dice: Dice, kind: Kind) -> Retry:
    on_error = on_success = None
    if dice.chance(2):
        on_error = OnError(
            when=dice.of(tuple(ERROR_GUARDS)),
            max_attempts=dice.between(1, 4),
            backoff=dice.of(_BACKOFFS),
            initial_delay=float(dice.below(2)),
            jitter=dice.chance(1),
            circuit=Circuit(failures=2, window_s=1.0, open_s=1.0) if dice.chance(2) else None,
        )
    if kind not in _TASKS and dice.chance(1):
        collect, merge_path = dice.of(_COLLECTS)
        on_success = OnSuccess(
            condition=dice.of(_WHILE_GUARDS_OF_LOOPS if kind in _LISTS else _WHILE_GUARDS),
            max_attempts=dice.between(1, 4),
            delay=float(dice.below(2)),
            next_call=NEXT_CALL if dice.chance(4) else {},
            collect=collect,
            merge_path=merge_path,
        )
    return Retry(on_error=on_error, on_success=on_success)


def _next(dice: Dice, number: int, kind: Kind, targets: list[int], retry: Retry) -> Next:
    guards = _GUARDS[kind]
    if retry.on_success is not None and kind == "call":
        guards = _PAGE_GUARDS
    arcs = [
        _arc(dice, target, guards) if target > number else _back_arc(dice, number, target)
        for target in targets
    ]
    if kind != "router" and targets and targets[-1] > number and dice.chance(3):
        arcs.append(_arc(dice, targets[-1], _FAILURE_GUARDS))
    if kind in {"call", "loop", "fanout"} and targets and targets[-1] > number and dice.chance(1):
        when = dice.of(_CHUNK_GUARDS)
        step = StepName(f"s{targets[-1]}")
        arcs.append(Arc(step=step, on="call.partial", when=when, input=dice.of(_ARC_INPUTS)))
    return Next(
        spec=NextSpec(mode=dice.of(_MODES), on_no_match=dice.of(_NO_MATCH)), arcs=tuple(arcs)
    )


_CHUNK_GUARDS = (*(None,) * 5, "{{ output.data.ok }}", "{{ output.data.no.such.thing }}")

_GUARDS: dict[Kind, Sequence[str | None]] = {
    "call": _CALL_GUARDS,
    "loop": _LOOP_GUARDS,
    "cursor": _LOOP_GUARDS,
    "fanout": _FANIN_GUARDS,
    "router": _ROUTER_GUARDS,
    "child": _CALL_GUARDS,
    "wait": _WAIT_GUARDS,
    "approval": _WAIT_GUARDS,
}


def _arc(dice: Dice, target: int, guards: Sequence[str | None]) -> Arc:
    when = dice.of(_FAILURE_GUARDS if dice.chance(1) else guards)
    return Arc(
        step=StepName(f"s{target}"),
        when=when,
        set=dice.of(_ARC_SETS),
        input=dice.of(_ARC_INPUTS),
    )


def _back_arc(dice: Dice, number: int, target: int) -> Arc:
    return Arc(
        step=StepName(f"s{target}"),
        when=_BACK_GUARD.format(number, dice.between(1, RETURNS_MAX)),
        set={f"ctx.back_{number}": _BACK_COUNT.format(number)},
    )


def _is_confluent(playbook: Playbook, tools: dict[StepName, Tool]) -> bool:
    steps = playbook.steps.values()
    if any(_depends_on_luck(step, tools[step.step]) for step in steps if step.tool):
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


def _depends_on_luck(step: Step, tool: Tool) -> bool:
    """A lost attempt counts for a tool that fails the first ones; a failed slot of a cursor claims
    no more, and which one that is depends on who was quicker; of a branch that ended last, a
    parent hears the result."""
    if tool.fails in {"first attempt", "first two attempts"}:
        return True
    is_cursor = step.loop is not None and step.loop.cursor is not None
    if is_cursor and tool.fails != "never":
        return True
    return _streams(step) or (step.tool[0].kind == "playbook" and tool.child == "itself")


def _child(*steps: Step, **tools: Tool) -> Plan:
    playbook = Playbook(
        metadata=Metadata(name="child"), workload=WORKLOAD, steps={s.step: s for s in steps}
    )
    return Plan(b"", playbook, {StepName(name): tool for name, tool in tools.items()}, None, True)


def _plain(name: str, *targets: str, kind: str = "noop", loop: Loop | None = None) -> Step:
    return Step(
        step=StepName(name),
        loop=loop,
        tool=(Task(label="task_0", kind=kind),),
        next=Next(arcs=tuple(Arc(step=StepName(target)) for target in targets)),
    )


_CHILDREN: dict[CatalogId, Plan] = {
    CHILD_CATALOGS["one"]: _child(_plain("c0"), c0=Tool(pushes=False)),
    CHILD_CATALOGS["loops"]: _child(
        _plain("c0", "c1"), _plain("c1", loop=Loop(collection=["x", "y"])), c0=Tool(), c1=Tool()
    ),
    CHILD_CATALOGS["fails"]: _child(
        _plain("c0", "c1"), _plain("c1"), c0=Tool(), c1=Tool(fails="always")
    ),
    CHILD_CATALOGS["waits"]: _child(
        _plain("c0", "c1", kind="wait"), _plain("c1"), c0=Tool(wait="for a signal"), c1=Tool()
    ),
    CHILD_CATALOGS["calls"]: _child(
        _plain("c0", "c1", kind="playbook"), _plain("c1"), c0=Tool(child="one"), c1=Tool()
    ),
}
RETURN_STEPS: dict[Child, StepName | None] = {"calls": StepName("c0")}
"""What a parent wants back, where it is not simply the last result."""
