"""What is true of an execution after a prefix of its log. Compact: counters, never lists of items.

Only `fold` changes a state. It may update the one it was given; nobody else holds it.
"""

from typing import Any, Literal

import msgspec

from noetl_core.domain.envelope import Envelope
from noetl_core.domain.errors import ToolError
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

ExecutionStatus = Literal["PENDING", "RUNNING", "COMPLETED", "FAILED", "CANCELLED"]
StepStatus = Literal["RUNNING", "COMPLETED", "FAILED", "CANCELLED"]

TERMINAL: frozenset[ExecutionStatus] = frozenset({"COMPLETED", "FAILED", "CANCELLED"})


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


class Visit(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A live entry into a step: a token stands here."""

    step: StepName
    visit: int
    loop: LoopState | None = None
    parent_ref: int | None = None


class OpenCommand(msgspec.Struct, kw_only=True, omit_defaults=True):
    step: StepName
    visit: int
    attempt: int = 1
    index: int | None = None
    worker_id: WorkerId | None = None


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
    epoch: EpochId = EpochId(0)
    error: ToolError | None = None

    @property
    def is_terminal(self) -> bool:
        return self.status in TERMINAL
