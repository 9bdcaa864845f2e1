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
from noetl_core.domain.playbook import PATH_LENGTH_MAX
from noetl_core.domain.progress import StepProgress
from noetl_core.domain.state import ExecutionStatus, StepStatus

BODY_BYTES_MAX = 2 * 1024 * 1024
PLAYBOOK_BYTES_MAX = 1024 * 1024
PAYLOAD_BYTES_MAX = 1024 * 1024
RESULTS_BYTES_MAX = 8 * 1024 * 1024
"""The results of all steps together in one answer; beyond it, a step's result is a reference."""
PAGE_SIZE_MAX = 1000
WAIT_SECONDS_MAX = 60.0
ID_MAX = 2**63 - 1
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


class ExecutionQuery(Request, frozen=True, kw_only=True):
    """`wait`: answer when the execution has ended, or after so many seconds."""

    wait: Annotated[float, Meta(ge=0, le=WAIT_SECONDS_MAX)] = 0.0


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
    command_id: Annotated[str, Meta(max_length=2000)]
    worker_id: Annotated[str, Meta(min_length=1, max_length=255)]
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
