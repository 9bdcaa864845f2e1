"""What is true of an execution after a prefix of its log. Compact: counters, never lists of items.

Only `fold` changes a state. It may update the one it was given; nobody else holds it.
"""

from typing import Any, Literal

import msgspec

from noetl_core.domain.envelope import Envelope
from noetl_core.domain.errors import ToolError
from noetl_core.domain.events import Chunk, Given
from noetl_core.domain.ids import (
    CatalogId,
    CommandId,
    EpochId,
    EventId,
    ExecutionId,
    LoopId,
    StepName,
    VisitId,
    WorkerId,
)

ExecutionStatus = Literal["PENDING", "RUNNING", "PAUSED", "COMPLETED", "FAILED", "CANCELLED"]
StepStatus = Literal["RUNNING", "COMPLETED", "FAILED", "CANCELLED", "SKIPPED"]

TERMINAL: frozenset[ExecutionStatus] = frozenset({"COMPLETED", "FAILED", "CANCELLED"})
OPEN: frozenset[ExecutionStatus] = frozenset({"RUNNING", "PAUSED"})

SIGNALS_MAX = 100
"""More than this are not kept for later: the oldest goes."""


class LoopState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One activation of a loop. `next_index` items were issued; the rest still wait."""

    loop_id: LoopId
    total: int
    part_size: int
    parts: int
    max_in_flight: int
    fail_fast: bool = True
    next_index: int = 0
    in_flight: int = 0
    done: int = 0
    failed: int = 0
    first_error: ToolError | None = None
    """Why the first iteration failed: what a person wants to know of a failed loop."""
    is_fanout: bool = False
    shard_retries_max: int = 0
    allow_partial: bool = True
    is_cursor: bool = False
    slots_ended: int = 0
    """Of a cursor: how many of its slots found nothing more to claim."""
    base: LoopId | None = None
    base_done: int = 0
    collection_id: LoopId | None = None


class Visit(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A live entry into a step: a token stands here."""

    step: StepName
    visit: int
    loop: LoopState | None = None
    parent_ref: int | None = None
    input: dict[str, Any] = {}
    chunk: Chunk | None = None


class Parked(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What an open command waits for."""

    kind: Literal["playbook", "wait", "approval"]
    child: ExecutionId | None = None
    signal: str = ""
    until_ms: int | None = None
    approvers: tuple[str, ...] = ()


class OpenCommand(msgspec.Struct, kw_only=True, omit_defaults=True):
    step: StepName
    visit: int
    attempt: int = 1
    index: int | None = None
    worker_id: WorkerId | None = None
    page: int = 1
    failures: int = 0
    given_back: int = 0
    call: dict[str, Any] = {}
    sequence: EventId | None = None
    chunks: int = 0
    parked: Parked | None = None

    @property
    def losses(self) -> int:
        """How many attempts were lost with their worker, this one included if it is lost now."""
        return self.attempt - self.failures - self.given_back


class Signal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What somebody told the execution and nobody has waited for yet."""

    signal_id: int
    name: str
    approved: bool = True
    by: str = ""
    result: Envelope | None = None


class StepState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What others may ask of a step: its latest visit, how it ended, where its result is."""

    visit: int = 0
    status: StepStatus = "RUNNING"
    result: Envelope | None = None
    error: ToolError | None = None
    total: int | None = None
    """Of a loop: how many items its latest activation has."""
    done: int = 0
    failed: int = 0
    loop_id: LoopId | None = None
    """Of a loop: its latest activation."""
    collection_id: LoopId | None = None
    """And the one that stored its items."""
    given: Given = Given()
    """What the token of its latest visit had brought along."""
    failed_at_ms: list[int] = []
    """When calls of the step failed lately, where a circuit breaker watches it."""
    open_until_ms: int = 0


class ExecutionState(msgspec.Struct, kw_only=True, omit_defaults=True):
    execution_id: ExecutionId
    catalog_id: CatalogId = CatalogId(0)
    status: ExecutionStatus = "PENDING"
    last_event_id: EventId = EventId(0)
    payload: Envelope | None = None
    ctx: dict[str, Any] = {}
    steps: dict[StepName, StepState] = {}
    visits: dict[VisitId, Visit] = {}
    arrivals: dict[StepName, int] = {}
    """Tokens on their way into a step: waiting at a barrier, or about to enter."""
    commands: dict[CommandId, OpenCommand] = {}
    inputs: dict[StepName, dict[str, Any]] = {}
    """What the arcs of tokens that wait at a barrier brought along."""
    signals: list[Signal] = []
    epoch: EpochId = EpochId(0)
    error: ToolError | None = None
    parent_execution_id: ExecutionId | None = None
    parent_command_id: CommandId | None = None
    return_step: StepName | None = None
    depth: int = 0
    iter_parent: dict[str, Any] = {}
    generation: int = 0
    """How often it was retried after its end."""
    pauses: int = 0
    interrupted: dict[StepName, list[Given]] = {}
    """Of an execution that has ended before its time: which steps a retry enters again, and what
    each of their visits had been given."""
    held_back: dict[StepName, int] = {}
    """And how many tokens waited at which barrier then."""
    orphans: list[ExecutionId] = []
    """Children that the last event left without anybody who waits for them: they are cancelled."""
    signals_seen: list[int] = []
    redo: list[StepName] = []
    """Loops that a retry enters again and that go on with what they left undone."""

    @property
    def is_terminal(self) -> bool:
        return self.status in TERMINAL

    @property
    def is_open(self) -> bool:
        """It was started and has not ended."""
        return self.status in OPEN
