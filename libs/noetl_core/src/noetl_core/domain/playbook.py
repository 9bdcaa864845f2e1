"""The playbook model: what every dialect parses into and everything else reads.

The structs carry the language of the documents (`in`, `set`, `next.arcs`), so the JSON Schema made
from them is the schema users see. Nothing here is rendered: strings may be templates.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec

from noetl_core.domain.ids import StepName

PATH_LENGTH_MAX = 512
MAX_IN_FLIGHT_DEFAULT = 100
FANOUT_WINDOW_DEFAULT = 500
CURSOR_SLOTS_DEFAULT = 4
SHARD_RETRIES_DEFAULT = 2
PAGES_DEFAULT = 100
RETRY_ATTEMPTS_DEFAULT = 3
POOL_DEFAULT = "cpu"
PLACEMENT_WAIT_DEFAULT = 30.0

LoopMode = Literal["sequential", "parallel", "fanout"]

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
    """`loop_mode` is what holds for loops that name no mode of their own."""

    entry_step: str | None = None
    final_step: str | None = None
    no_next_is_error: bool = False
    loop_mode: LoopMode = "parallel"
    timeout_s: float | None = None
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


class Frame(Model, frozen=True, kw_only=True):
    """How a cursor loop works on what it claimed: row by row, or all of it at once."""

    max_rows: int = 50
    process: Literal["row", "frame"] = "row"
    row_concurrency: int = 1
    lease_seconds: float = 120.0


class Cursor(Model, frozen=True, kw_only=True):
    """Where a cursor loop gets its work. `claim` is a statement that takes rows and gives them."""

    kind: Literal["postgres"] = "postgres"
    auth: Any = None
    claim: str


class LoopSpec(Model, frozen=True, kw_only=True):
    mode: Literal["sequential", "parallel", "fanout", "cursor"] = "parallel"
    max_in_flight: int = MAX_IN_FLIGHT_DEFAULT
    chunk_size: int | None = None
    frame: Frame = Frame()


class Loop(Model, frozen=True, kw_only=True):
    collection: Any = msgspec.field(name="in", default=None)
    cursor: Cursor | None = None
    iterator: str = "item"
    spec: LoopSpec = LoopSpec()


class Circuit(Model, frozen=True, kw_only=True):
    """After so many failures within the window, nothing is tried for a while."""

    failures: int = 10
    window_s: float = 60.0
    open_s: float = 30.0


class OnError(Model, frozen=True, kw_only=True):
    """`max_attempts` counts the first attempt too."""

    when: str | None = None
    max_attempts: int = RETRY_ATTEMPTS_DEFAULT
    backoff: Literal["fixed", "linear", "exponential"] = "exponential"
    initial_delay: float = 1.0
    max_delay: float = 60.0
    jitter: bool = False
    circuit: Circuit | None = None


class OnSuccess(Model, frozen=True, kw_only=True):
    """Pages and polling: the call is made again while the guard holds, with `next_call` over it."""

    condition: str = msgspec.field(name="while")
    max_attempts: int = PAGES_DEFAULT
    delay: float = 0.0
    next_call: dict[str, Any] = {}
    collect: Literal["append", "replace", "collect"] = "append"
    merge_path: str = ""


class Retry(Model, frozen=True, kw_only=True):
    on_error: OnError | None = None
    on_success: OnSuccess | None = None


class Sink(Model, frozen=True, kw_only=True):
    """Where a result goes in the same command. `config` holds the fields of its tool."""

    tool: Literal["postgres", "duckdb", "s3", "http", "python"]
    auth: Any = None
    table: str = ""
    mode: Literal["append", "upsert", "replace"] = "append"
    key: tuple[str, ...] = ()
    args: Any = None
    """One row, or a list of rows. None: the result itself."""
    config: dict[str, Any] = {}


class Store(Model, frozen=True, kw_only=True):
    kind: Literal["auto", "db", "pvc", "minio", "s3", "gcs"] = "auto"
    ttl_s: float | None = None


class Output(Model, frozen=True, kw_only=True):
    """What is kept of a result, and where."""

    select: tuple[str, ...] = ()
    store: Store = Store()


class FailurePolicy(Model, frozen=True, kw_only=True):
    mode: Literal["fail_fast", "best_effort"] = "fail_fast"


class AdmitRule(Model, frozen=True, kw_only=True):
    """First match wins; `when` is None for the `else` rule."""

    when: str | None = None
    allow: bool = True


class StepPolicy(Model, frozen=True, kw_only=True):
    failure: FailurePolicy = FailurePolicy()
    admit: tuple[AdmitRule, ...] = ()


class Fanout(Model, frozen=True, kw_only=True):
    max_shard_retries: int = SHARD_RETRIES_DEFAULT
    fail_fast: bool = False
    allow_partial: bool = True


class Placement(Model, frozen=True, kw_only=True):
    """Which workers of the pool run a step: a condition (`labels`) and a wish (the rest).

    `affinity` is a key, and equal keys go to the same worker; `previous` is the worker whose result
    led to the step. For `wait_s` only the worker that is wished for may take a command.
    """

    labels: dict[str, str] = {}
    worker: str | None = None
    affinity: str | None = None
    wait_s: float = PLACEMENT_WAIT_DEFAULT


class StepSpec(Model, frozen=True, kw_only=True):
    timeout_s: float | None = None
    pool: str = POOL_DEFAULT
    join: Literal["any", "all"] | None = None
    priority: int = 0
    policy: StepPolicy = StepPolicy()
    fanout: Fanout = Fanout()
    placement: Placement | None = None


class Arc(Model, frozen=True, kw_only=True):
    """`on: call.partial` is taken once for every chunk of a streamed result."""

    step: StepName
    when: str | None = None
    on: Literal["call.partial"] | None = None
    set: dict[str, Any] = {}
    input: dict[str, Any] = {}


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
    retry: Retry = Retry()
    sink: Sink | None = None
    output: Output = Output()
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
