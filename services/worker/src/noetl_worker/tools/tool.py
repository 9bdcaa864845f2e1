"""What a tool is: one class with `kind` and `run`. Rendered data in, data or an error out.

A tool never raises for what may happen: it returns the error, with a kind that rules and guards can
look at. It is cancelled at its timeout and when its execution is cancelled, and then stops what it
has started.

What waits for something elsewhere (a child execution, a moment, a person) holds no worker: such a
tool says what it waits for, `ToolParked`, and the command goes on without us.
"""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from noetl_core.domain.envelope import Reference
from noetl_core.domain.errors import ToolError
from noetl_core.domain.ids import CatalogId, CommandId, ExecutionId, StepName


class Credential(NamedTuple):
    """An opened credential. It lives in this process only: not in results, events or logs."""

    name: str
    type: str
    data: Mapping[str, Any]


class Results(Protocol):
    """Results of the execution that are stored elsewhere; both raise ReferenceNotAvailableError."""

    async def load(self, reference: Reference) -> Any: ...

    async def file(self, reference: Reference) -> Path | None:
        """Where its bytes lie, for a tool that reads them in place; None if in no file."""
        ...


class ToolCall(NamedTuple):
    """One call of a tool: everything is rendered, nothing in it may be changed."""

    execution_id: ExecutionId
    command_id: CommandId
    step: str
    label: str
    config: Mapping[str, Any]
    input: Mapping[str, Any]
    names: Mapping[str, Any]
    """What code may use by bare name: the input, the element of the loop."""
    attempt: int
    timeout_s: float | None
    credential: Callable[[str], Awaitable[Credential]]
    """Opens a credential by name; raises ToolFailedError."""
    results: Results
    emit: Callable[[Any], Awaitable[None]] | None = None
    """Sends a chunk of the result ahead: any document. None where nobody listens to chunks.

    Every call emits all its chunks in the same order, also those that were sent already: they are
    counted and dropped, so for them the document may be None. When it returns the chunk is safe.
    Raises ToolFailedError.
    """
    chunks_done: int = 0
    """How many chunks of this call were sent already, by it or by an earlier attempt."""

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt: a target that honours it does the work once."""
        return idempotency_key(self.execution_id, self.command_id)


def idempotency_key(execution_id: ExecutionId, command_id: CommandId) -> str:
    """The command's id without the number of its attempt."""
    return f"{execution_id}:{command_id.rpartition('#')[0]}"


class ToolResult(NamedTuple):
    data: Any = None
    error: ToolError | None = None
    meta: Mapping[str, Any] = {}
    """What is worth keeping beside the data, such as captured output."""


class ToolParked(NamedTuple):
    """What a command waits for; only for kinds in PARKED_KINDS.

    `playbook`: the child to start and its payload. `wait`, `approval`: the signal that ends it, and
    what a person is to be told. `until_ms`: when the waiting ends by itself, by the wall clock.
    """

    catalog_id: CatalogId | None = None
    path: str = ""
    version: int = 0
    payload: Mapping[str, Any] | None = None
    return_step: StepName | None = None
    signal: str = ""
    until_ms: int | None = None
    details: Mapping[str, Any] = {}


class Tool(Protocol):
    @property
    def kind(self) -> str: ...

    async def run(self, call: ToolCall) -> ToolResult | ToolParked: ...

    async def close(self) -> None: ...


class ToolFailedError(Exception):
    """Carries a tool's error out of its depths; `run` or the pipeline turns it into a result."""

    def __init__(self, error: ToolError) -> None:
        super().__init__(error.message)
        self.error = error


def failure(
    kind: str, message: str, *, code: str = "", retryable: bool = False, **details: Any
) -> ToolResult:
    return ToolResult(
        error=ToolError(kind=kind, message=message, code=code, retryable=retryable, details=details)
    )


def wrong_field(field: str, problem: str) -> ToolFailedError:
    """The playbook gives the tool something it cannot take."""
    return ToolFailedError(
        ToolError(kind="client_error", code="WRONG_FIELD", message=f"`{field}` {problem}")
    )
