"""The playbook model: what every dialect parses into and everything else reads.

The structs carry the language of the documents (`in`, `set`, `next.arcs`), so the JSON Schema made
from them is the schema users see. Nothing here is rendered: strings may be templates.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec

from noetl_core.domain.ids import StepName

MAX_IN_FLIGHT_DEFAULT = 100
RETRY_ATTEMPTS_DEFAULT = 3
POOL_DEFAULT = "cpu"

T = TypeVar("T")


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A piece of a playbook: immutable, and a key it does not know is an error."""


class Metadata(Model, frozen=True, kw_only=True):
    name: str
    path: str = ""
    description: str = ""
    labels: dict[str, str] = {}
    tags: tuple[str, ...] = ()


class Defaults(Model, frozen=True, kw_only=True):
    timeout_s: float | None = None


class ExecutorPolicy(Model, frozen=True, kw_only=True):
    defaults: Defaults = Defaults()


class ExecutorSpec(Model, frozen=True, kw_only=True):
    entry_step: str | None = None
    final_step: str | None = None
    no_next_is_error: bool = False
    policy: ExecutorPolicy = ExecutorPolicy()


class Executor(Model, frozen=True, kw_only=True):
    spec: ExecutorSpec = ExecutorSpec()


class KeychainEntry(Model, frozen=True, kw_only=True):
    name: str
    kind: str = ""


class Action(Model, frozen=True, kw_only=True):
    """What a policy rule does after a task: go on, try again, jump, stop."""

    do: Literal["continue", "retry", "jump", "break", "fail"] = "continue"
    attempts: int = RETRY_ATTEMPTS_DEFAULT
    delay: float = 0.0
    backoff: Literal["fixed", "linear", "exponential"] = "fixed"
    to: str | None = None
    set: dict[str, Any] = {}


class Rule(Model, frozen=True, kw_only=True):
    """First match wins; `when` is None for the `else` rule."""

    when: str | None = None
    then: Action = Action()


class Task(Model, frozen=True, kw_only=True):
    """One tool call of a pipeline. `config` holds the fields of its kind, templates unrendered."""

    label: str
    kind: str
    config: dict[str, Any] = {}
    input: dict[str, Any] = {}
    set: dict[str, Any] = {}
    rules: tuple[Rule, ...] = ()
    timeout_s: float | None = None


class LoopSpec(Model, frozen=True, kw_only=True):
    mode: Literal["sequential", "parallel"] = "parallel"
    max_in_flight: int = MAX_IN_FLIGHT_DEFAULT


class Loop(Model, frozen=True, kw_only=True):
    collection: Any = msgspec.field(name="in")
    iterator: str = "item"
    spec: LoopSpec = LoopSpec()


class FailurePolicy(Model, frozen=True, kw_only=True):
    mode: Literal["fail_fast", "best_effort"] = "fail_fast"


class StepPolicy(Model, frozen=True, kw_only=True):
    failure: FailurePolicy = FailurePolicy()


class StepSpec(Model, frozen=True, kw_only=True):
    timeout_s: float | None = None
    pool: str = POOL_DEFAULT
    join: Literal["any", "all"] | None = None
    priority: int = 0
    policy: StepPolicy = StepPolicy()


class Arc(Model, frozen=True, kw_only=True):
    step: StepName
    when: str | None = None
    set: dict[str, Any] = {}


class NextSpec(Model, frozen=True, kw_only=True):
    mode: Literal["exclusive", "inclusive"] = "exclusive"
    on_no_match: Literal["complete", "fail"] = "complete"


class Next(Model, frozen=True, kw_only=True):
    spec: NextSpec = NextSpec()
    arcs: tuple[Arc, ...] = ()


class Step(Model, frozen=True, kw_only=True):
    step: StepName
    desc: str = ""
    spec: StepSpec = StepSpec()
    input: dict[str, Any] = {}
    loop: Loop | None = None
    tool: tuple[Task, ...] = ()
    set: dict[str, Any] = {}
    next: Next = Next()


class Playbook(Model, frozen=True, kw_only=True, dict=True):
    """A parsed, checked playbook. `steps` keeps the order of the document."""

    metadata: Metadata
    executor: Executor = Executor()
    keychain: tuple[KeychainEntry, ...] = ()
    workload: dict[str, Any] = {}
    steps: dict[StepName, Step]

    @property
    def path(self) -> str:
        return self.metadata.path or self.metadata.name

    @property
    def entry_step(self) -> StepName:
        named = self.executor.spec.entry_step
        return StepName(named) if named is not None else next(iter(self.steps))


def per_playbook(compute: Callable[[Playbook], T]) -> Callable[[Playbook], T]:
    """Compute once for each playbook object and keep the answer with it.

    A playbook never changes, and it is parsed once and run for a long time; what is derived from it
    (the arc graph, what its templates read) lives and dies with the object.
    """
    key = f"{compute.__module__}.{compute.__qualname__}"

    def computed(playbook: Playbook) -> T:
        kept: dict[str, Any] = playbook.__dict__
        if key not in kept:
            kept[key] = compute(playbook)
        answer: T = kept[key]
        return answer

    return computed
