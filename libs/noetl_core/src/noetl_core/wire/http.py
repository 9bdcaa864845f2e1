"""What clients and the gateway say to each other, in JSON. Ids are strings: 64 bits do not fit a
number in every language.

A request with a field it does not know is refused. An answer may grow fields: clients ignore what
they do not know.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from noetl_core.domain.errors import Problem, ToolError
from noetl_core.domain.ids import ID_MAX
from noetl_core.domain.playbook import PATH_LENGTH_MAX
from noetl_core.domain.progress import StepProgress
from noetl_core.domain.sharding import VNODE_COUNT
from noetl_core.domain.state import ExecutionStatus, StepStatus
from noetl_core.wire.messages import NAME_PATTERN

BODY_BYTES_MAX = 2 * 1024 * 1024
PLAYBOOK_BYTES_MAX = 1024 * 1024
PAYLOAD_BYTES_MAX = 1024 * 1024
RESULTS_BYTES_MAX = 8 * 1024 * 1024
"""The results of all steps together in one answer; beyond it, a step's result is a reference."""
PAGE_SIZE_MAX = 1000
WAIT_SECONDS_MAX = 60.0
VERSION_MAX = 2**31 - 1

IDEMPOTENCY_HEADER = "Idempotency-Key"

Path = Annotated[
    str,
    Meta(min_length=1, max_length=PATH_LENGTH_MAX, description="Where the catalog keeps it."),
]
Version = Annotated[int, Meta(ge=1, le=VERSION_MAX)]
PageSize = Annotated[int, Meta(ge=1, le=PAGE_SIZE_MAX)]
IdempotencyKey = Annotated[str, Meta(min_length=1, max_length=255)]
CredentialName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}$")]


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something a client sends."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Something the gateway sends."""


# Catalog


class RegisterRequest(Request, frozen=True, kw_only=True):
    """The same can be sent as the bare document, with `Content-Type: text/yaml`."""

    content: Annotated[str, Meta(min_length=1, description="The playbook, as YAML text.")]


class Registered(Answer, frozen=True, kw_only=True):
    """`created` is false when the newest version of the path had this content already."""

    catalog_id: str
    path: str
    version: int
    created: bool
    warnings: list[Problem] = []


class Validated(Answer, frozen=True, kw_only=True):
    """A question was asked, so the answer is 200 either way; `valid` says which."""

    valid: bool
    path: str | None = None
    problems: list[Problem] = []


class CatalogItem(Answer, frozen=True, kw_only=True):
    catalog_id: str
    path: str
    version: int
    created_at: datetime


class CatalogPage(Answer, frozen=True, kw_only=True):
    """`next_cursor` is null on the last page."""

    items: list[CatalogItem]
    next_cursor: str | None = None


class CatalogDocument(CatalogItem, frozen=True, kw_only=True):
    sha256: str
    content: str


class CatalogQuery(Request, frozen=True, kw_only=True):
    limit: PageSize = 100
    cursor: str = ""


class VersionQuery(Request, frozen=True, kw_only=True):
    version: Version | None = None


# Executions


class ExecuteRequest(Request, frozen=True, kw_only=True):
    """`payload` is merged over the playbook's workload; without `version` the newest runs."""

    path: Path
    version: Version | None = None
    payload: dict[str, Any] = {}
    idempotency_key: IdempotencyKey | None = None


class ExecutionAccepted(Answer, frozen=True, kw_only=True):
    """The request is stored: whatever dies now, it will run. `repeated`: it was stored before."""

    execution_id: str
    catalog_id: str
    path: str
    version: int
    status: ExecutionStatus = "PENDING"
    repeated: bool = False


class ExecutionView(Answer, frozen=True, kw_only=True):
    execution_id: str
    catalog_id: str
    path: str
    version: int
    status: ExecutionStatus
    progress: dict[str, StepProgress] = {}
    waiting_on: str | None = None
    error: dict[str, Any] | None = None
    last_event_type: str | None = None
    last_node_name: str | None = None
    last_event_id: str | None = None
    parent_execution_id: str | None = None
    started_at: datetime
    updated_at: datetime
    ended_at: datetime | None = None


class ExecutionPage(Answer, frozen=True, kw_only=True):
    """From the newest to the oldest. `next_cursor` is null on the last page."""

    items: list[ExecutionView]
    next_cursor: str | None = None


class ExecutionsQuery(Request, frozen=True, kw_only=True):
    status: ExecutionStatus | None = None
    path: Path | None = None
    limit: PageSize = 50
    cursor: str | None = None


WaitSeconds = Annotated[float, Meta(ge=0, le=WAIT_SECONDS_MAX)]
KnownEvent = Annotated[
    int,
    Meta(ge=0, le=ID_MAX, description="The answer is not older than this event; else it is a 504."),
]


class ExecutionQuery(Request, frozen=True, kw_only=True):
    """`wait`: answer when the execution has ended, or after so many seconds.

    `min_event_id`: the answer shows this event. It may take `wait` seconds until it does, or 5.
    """

    wait: WaitSeconds | None = None
    min_event_id: KnownEvent = 0


class StepsQuery(Request, frozen=True, kw_only=True):
    """`min_event_id`: the answer shows this event. It may take `wait` seconds until it does."""

    min_event_id: KnownEvent = 0
    wait: WaitSeconds = 5.0


class EventView(Answer, frozen=True, kw_only=True):
    """A row of the log. `result` is an envelope: it refers to a payload, it never holds one."""

    event_id: str
    event_type: str
    created_at: datetime
    status: str | None = None
    node_name: str | None = None
    command_id: str | None = None
    loop_id: str | None = None
    iter_index: int | None = None
    attempt: int | None = None
    parent_event_id: str | None = None
    parent_execution_id: str | None = None
    catalog_id: str | None = None
    epoch_id: str | None = None
    context: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    meta: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


class EventPage(Answer, frozen=True, kw_only=True):
    """In log order. `next_after` is null when these were the last so far: to follow a running
    execution, ask again with `after` = the last `event_id` seen.
    """

    items: list[EventView]
    next_after: str | None = None


class EventsQuery(Request, frozen=True, kw_only=True):
    after: Annotated[int, Meta(ge=0, le=ID_MAX)] = 0
    limit: PageSize = 200


class StepView(Answer, frozen=True, kw_only=True):
    """A step's latest visit. `result` is the value itself; a loop's is the list of its items'."""

    status: StepStatus
    visit: int
    result: Any = None
    error: dict[str, Any] | None = None


class Truncated(msgspec.Struct, frozen=True, kw_only=True):
    """Stands where a result is too large for the answer, or no JSON; `ref` is a path of the API."""

    truncated: bool = msgspec.field(name="_truncated", default=True)
    ref: str = msgspec.field(name="_ref")
    bytes: int = msgspec.field(name="_bytes")


class Unavailable(msgspec.Struct, frozen=True, kw_only=True):
    """Stands where a result cannot be read back: it expired, or its tier is not configured."""

    unavailable: bool = msgspec.field(name="_unavailable", default=True)
    reason: str = msgspec.field(name="_reason")


class TraceLink(Answer, frozen=True, kw_only=True):
    """One result: what recorded it, and where its payload is.

    `status` is that of the result, `type` that of its reference: `db` and `object_store` are
    payloads (`tier`, `media_type`, `sha256`), `eventlog` is the list of a loop, `pages` that of a
    sequence of calls. Without a `ref_id` the call returned nothing.
    """

    execution_id: str
    step: str | None = None
    command_id: str | None = None
    attempt: int | None = None
    event_id: str | None = None
    event_type: str | None = None
    recorded_at: datetime | None = None
    status: str | None = None
    ref_id: str | None = None
    ref_execution_id: str | None = None
    type: str | None = None
    tier: str | None = None
    uri: str | None = None
    bytes: int | None = None
    media_type: str | None = None
    sha256: str | None = None
    expires_at: datetime | None = None
    parent_ref_id: str | None = None


class Trace(Answer, frozen=True, kw_only=True):
    """From the result of the step back to the first one. `is_complete` is false where the chain
    is longer than one answer, or a result of it was recorded by nobody who is known here.
    """

    execution_id: str
    step: str
    links: list[TraceLink]
    is_complete: bool


class CancelRequest(Request, frozen=True, kw_only=True):
    reason: Annotated[str, Meta(max_length=1000)] = ""


class CancelAccepted(Answer, frozen=True, kw_only=True):
    """The wish is stored; the execution ends as CANCELLED unless it ends by itself before."""

    execution_id: str
    accepted: Literal[True] = True


# Control


Text = Annotated[str, Meta(max_length=1000)]
StepOfPlaybook = Annotated[str, Meta(min_length=1, max_length=1000)]


class ControlAccepted(Answer, frozen=True, kw_only=True):
    """The wish is stored, and the broker acts on it unless the execution has moved on before."""

    execution_id: str
    accepted: Literal[True] = True


class SignalRequest(Request, frozen=True, kw_only=True):
    """`name` is what a step waits for. An approval that is not `approved` fails its step."""

    name: Annotated[str, Meta(min_length=1, max_length=255)]
    data: Any = None
    approved: bool = True
    by: Annotated[str, Meta(max_length=255)] = ""


class PauseRequest(Request, frozen=True, kw_only=True):
    reason: Text = ""


class RetryRequest(Request, frozen=True, kw_only=True):
    """Without `step` it goes on where it ended. A loop runs what failed again, or all items."""

    step: StepOfPlaybook | None = None
    items: Literal["failed", "all"] = "failed"


class RerunRequest(Request, frozen=True, kw_only=True):
    """`payload` is merged over the one that the execution was started with."""

    payload: dict[str, Any] = {}


class ForkRequest(Request, frozen=True, kw_only=True):
    """The new execution begins at `step`, with what was true when that was last entered."""

    step: StepOfPlaybook
    payload: dict[str, Any] = {}


class ChildrenQuery(Request, frozen=True, kw_only=True):
    """`after` is the `next_cursor` of the page before."""

    after: Annotated[int, Meta(ge=0, le=ID_MAX)] = 0
    limit: PageSize = 100


# Events of other systems


class EventReport(Request, frozen=True, kw_only=True):
    """What became of a command: `call.done` with its `result`, `call.error` with its `error`,
    `command.claimed`. The names that older servers used are understood too.
    """

    execution_id: str | int
    event_type: Annotated[str, Meta(max_length=100)]
    command_id: Annotated[str, Meta(max_length=2000, pattern=NAME_PATTERN)]
    worker_id: Annotated[str, Meta(max_length=255, pattern=NAME_PATTERN)]
    result: Any = None
    error: ToolError | str | None = None
    context: dict[str, Any] = {}
    ctx: dict[str, Any] = {}
    duration_ms: Annotated[float, Meta(ge=0)] = 0.0


class EventsAccepted(Answer, frozen=True, kw_only=True):
    """They are stored. One from a worker that does not hold the command changes nothing."""

    accepted: int


# Credentials


class CredentialRequest(Request, frozen=True, kw_only=True):
    """`data` goes in and never comes out: only a worker that runs a command reads it."""

    name: CredentialName
    type: CredentialName
    data: Annotated[dict[str, Any], Meta(min_length=1)]


class CredentialItem(Answer, frozen=True, kw_only=True):
    name: str
    type: str
    created_at: datetime
    updated_at: datetime


class CredentialPage(Answer, frozen=True, kw_only=True):
    """In order of name. `next_cursor` is null on the last page."""

    items: list[CredentialItem]
    next_cursor: str | None = None


class CredentialsQuery(Request, frozen=True, kw_only=True):
    limit: PageSize = 200
    cursor: str = ""


# Templates


class RenderRequest(Request, frozen=True, kw_only=True):
    """`template` is a string, or an object or list of them; `context` holds the names it reads."""

    template: Any
    context: dict[str, Any] = {}


class Rendered(Answer, frozen=True, kw_only=True):
    value: Any


# Why it stands where it stands


class CommandView(Answer, frozen=True, kw_only=True):
    """An open command. `heartbeat_age_seconds`: when its worker last said that it has it."""

    command_id: str
    step: str
    status: str
    pool: str
    attempt: int
    worker_id: str | None = None
    heartbeat_age_seconds: float | None = None
    available_at: datetime
    lease_until: datetime | None = None


class Explanation(Answer, frozen=True, kw_only=True):
    """`sentences` are for a person. `commands` lists some of what is open, what is held first."""

    execution_id: str
    status: ExecutionStatus
    waiting_on: str | None = None
    sentences: list[str]
    commands: list[CommandView] = []
    dead_letters: list[str] = []


# Dead letters


class DeadLettersQuery(Request, frozen=True, kw_only=True):
    """`source` is who set it aside: broker, command, projection, projection.differs or reaper."""

    execution_id: Annotated[int, Meta(ge=0, le=ID_MAX)] | None = None
    source: Annotated[str, Meta(max_length=100)] | None = None
    before: Annotated[int, Meta(ge=0, le=ID_MAX)] = ID_MAX
    limit: PageSize = 100


class DeadLetterItem(Answer, frozen=True, kw_only=True):
    dead_letter_id: str
    execution_id: str | None = None
    shard_id: int | None = None
    source: str
    reason: str
    bytes: int
    created_at: datetime


class DeadLetterPage(Answer, frozen=True, kw_only=True):
    """From the newest to the oldest. `next_before` is null on the last page."""

    items: list[DeadLetterItem]
    next_before: str | None = None


class DeadLetterDocument(DeadLetterItem, frozen=True, kw_only=True):
    """`messages` is what was set aside, where it can be read; payloads are shown by their size."""

    messages: list[Any] | None = None
    unreadable: str | None = None


class DeadLetterRetried(Answer, frozen=True, kw_only=True):
    """`did` says what was done with it; `execution_id` is the execution that goes on."""

    dead_letter_id: str
    execution_id: str
    did: str


class DeadLetterDiscarded(Answer, frozen=True, kw_only=True):
    dead_letter_id: str
    discarded: Literal[True] = True


# The runtime control loop


ComponentName = Annotated[str, Meta(min_length=1, max_length=255)]
ComponentKind = Literal["worker_pool", "server_api", "broker"]
ComponentStatus = Literal["ready", "draining", "offline"]
CAPACITY_MAX = 1_000_000
Slots = Annotated[int, Meta(ge=0, le=CAPACITY_MAX)]


class ComponentReport(Request, frozen=True, kw_only=True):
    """What may be said of a process, when it is registered and with any heartbeat.

    `available_slots`, `active_tasks` and `tool_pools` are other names of `free`, `running` and
    `tools`. Without a status it is ready, or about to end if it has said so.
    """

    runtime: Annotated[str, Meta(max_length=64, description="Of a pool: cpu, gpu, ...")] = ""
    uri: Text | None = None
    base_url: Text | None = None
    status: ComponentStatus | None = None
    capacity: Slots | None = None
    labels: list[str] | dict[str, Any] | None = None
    capabilities: list[str] | None = None
    pid: int | None = None
    hostname: Annotated[str, Meta(max_length=255)] | None = None
    running: Slots | None = None
    free: Slots | None = None
    tools: dict[str, Any] | None = None
    worker_id: Annotated[str, Meta(max_length=200)] | None = None
    available_slots: Slots | None = None
    active_tasks: Slots | None = None
    tool_pools: dict[str, Any] | None = None
    heartbeat_interval_seconds: Annotated[float, Meta(gt=0, le=3600)] | None = None


class PoolRegisterRequest(ComponentReport, frozen=True, kw_only=True):
    """`runtime` is the pool whose commands it runs."""

    name: ComponentName
    runtime: Annotated[str, Meta(min_length=1, max_length=64)]


class PoolHeartbeatRequest(ComponentReport, frozen=True, kw_only=True):
    """The name is enough; without one, `worker_id` is it. With `runtime`, one that was forgotten is
    registered anew.
    """

    name: ComponentName | None = None


class ComponentRegisterRequest(ComponentReport, frozen=True, kw_only=True):
    name: ComponentName
    component_type: ComponentKind = "server_api"


class ComponentHeartbeatRequest(ComponentReport, frozen=True, kw_only=True):
    name: ComponentName
    component_type: ComponentKind = "server_api"


class DeregisterRequest(Request, frozen=True, kw_only=True):
    """In the body or in the query."""

    name: ComponentName
    component_type: ComponentKind | None = None


class Registration(Answer, frozen=True, kw_only=True):
    """`recreated`: it was not known, and the heartbeat said enough to register it."""

    status: Literal["ok"] = "ok"
    name: str
    kind: str
    runtime_id: str
    recreated: bool = False


class RuntimesQuery(Request, frozen=True, kw_only=True):
    kind: Annotated[str, Meta(max_length=64)] | None = None
    status: ComponentStatus | None = None
    limit: PageSize = 1000


class RuntimeView(Answer, frozen=True, kw_only=True):
    """A process that is registered, by itself or through this API."""

    runtime_id: str
    kind: str
    name: str
    status: str
    uri: str | None = None
    labels: Any = None
    capabilities: Any = None
    capacity: int | None = None
    runtime: Any = None
    heartbeat: datetime
    heartbeat_age_seconds: float
    registered_at: datetime


class RuntimePage(Answer, frozen=True, kw_only=True):
    items: list[RuntimeView]


class WorkerView(Answer, frozen=True, kw_only=True):
    """Its capacity as of its last heartbeat; what follows from nothing that it said is null."""

    name: str
    kind: str
    status: str
    uri: str | None = None
    pools: list[str]
    pool_name: str | None = None
    labels: dict[str, Any] = {}
    slots: int | None = None
    running: int | None = None
    free: int | None = None
    tools: dict[str, Any] = {}
    capabilities: list[str] = []
    hostname: str | None = None
    pid: int | None = None
    heartbeat_age_seconds: float


class WorkerPage(Answer, frozen=True, kw_only=True):
    """Those that are offline stand last. At most 10,000."""

    items: list[WorkerView]


class ToolCapacity(Answer, frozen=True, kw_only=True):
    """How many calls of a tool run at a time, and how many more could; null where nobody says."""

    slots: int | None = None
    free: int | None = None


class PoolView(Answer, frozen=True, kw_only=True):
    """All workers of a pool together.

    `workers`, `capacity`, `free` and `tools` count those that are ready, `running` also those that
    are about to end (`draining`). `labels` are those that all of them have; `uri` is that of
    the one that was heard of last.
    """

    name: str
    runtime: str
    status: Literal["ready", "draining", "offline"]
    uri: str | None = None
    labels: dict[str, Any] = {}
    workers: int
    draining: int = 0
    capacity: int
    running: int
    free: int
    tools: dict[str, ToolCapacity] = {}
    members: list[str]
    heartbeat_age_seconds: float


class PoolPage(Answer, frozen=True, kw_only=True):
    items: list[PoolView]


Moment = Annotated[datetime, Meta(tz=True, description="With its zone, such as Z.")]


class MetricSample(Request, frozen=True, kw_only=True):
    """Without `reported_at` it is of now, and so is one of a time that is still to come. The labels
    `component` and `kind` are those of who reports, whatever it says.
    """

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    value: float
    labels: dict[str, str] = {}
    reported_at: Moment | None = None


class MetricsReport(Request, frozen=True, kw_only=True):
    """`component` is the name of who reports."""

    component: ComponentName
    kind: Annotated[str, Meta(max_length=64)] = "worker_pool"
    metrics: Annotated[list[MetricSample], Meta(min_length=1, max_length=1000)]


class MetricsAccepted(Answer, frozen=True, kw_only=True):
    accepted: int


class MetricsQuery(Request, frozen=True, kw_only=True):
    name: Annotated[str, Meta(max_length=200)] | None = None
    component: ComponentName | None = None
    kind: Annotated[str, Meta(max_length=64)] | None = None
    since: Moment | None = None
    until: Moment | None = None
    before: Annotated[int, Meta(ge=0, le=ID_MAX)] = ID_MAX
    limit: PageSize = 200


class MetricView(Answer, frozen=True, kw_only=True):
    name: str
    value: float
    labels: dict[str, Any] = {}
    reported_at: datetime


class MetricPage(Answer, frozen=True, kw_only=True):
    """From the last one reported to the first. `next_before` is null on the last page."""

    items: list[MetricView]
    next_before: str | None = None


# Questions in SQL


class SqlRequest(Request, frozen=True, kw_only=True):
    """One SELECT on the schema `noetl`."""

    query: Annotated[str, Meta(min_length=1, max_length=100_000)]


class SqlAnswer(Answer, frozen=True, kw_only=True):
    """`truncated`: there were more rows than an answer may have."""

    status: Literal["ok"] = "ok"
    columns: list[str]
    result: list[Any]
    truncated: bool = False


# Shards


class ShardView(Answer, frozen=True, kw_only=True):
    """`instance` is null while nobody holds the lease. A projection has a lag: the age of
    the first event that it has not shown, in milliseconds. A broker has messages that wait in its
    inbox. `is_leaving`: beyond the count since it changed.
    """

    role: str
    shard_id: int
    epoch: int
    instance: str | None
    leased_until: datetime | None
    lag_ms: int | None
    waiting: int | None
    is_leaving: bool


class ResizeView(Answer, frozen=True, kw_only=True):
    """A change of the shard count. It is done when the projection has passed it (`drained_at`)."""

    shards_from: int = msgspec.field(name="from")
    shards_to: int = msgspec.field(name="to")
    requested_at: datetime
    switched_at: datetime | None
    drained_at: datetime | None
    refused: str | None


class ShardsView(Answer, frozen=True, kw_only=True):
    """`resize` is the last change of the count, or the one under way."""

    count: int
    resize: ResizeView | None
    shards: list[ShardView]


class ResizeRequest(Request, frozen=True, kw_only=True):
    """`from` must be the count of now, so that two wishes at a time cannot both be granted."""

    shards_from: int = msgspec.field(name="from")
    shards_to: Annotated[int, Meta(ge=1, le=VNODE_COUNT)] = msgspec.field(name="to")


# The service itself


class Health(Answer, frozen=True, kw_only=True):
    status: Literal["ok"] = "ok"


class ProblemDetails(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """RFC 9457. Every answer of 4xx or 5xx is one, as `application/problem+json`."""

    type: str
    title: str
    status: int
    detail: str = ""
    field: str | None = None
    problems: list[Problem] | None = None
