"""The errors of the system. The class says what the caller should do:

NoetlError
 ├─ RetryableError        the same call may succeed later
 ├─ RejectedError         tell the user, who can mend it
 │   ├─ PlaybookInvalidError   with every problem: file, line, column, key
 │   ├─ NotFoundError
 │   ├─ ConflictError
 │   └─ TemplateError          names the step, the field and the name
 ├─ ReferenceNeeded       decide() wants a value that is stored elsewhere: load it and ask again
 └─ ShardLostError        another process owns the shard: stop writing

Anything else is a bug: let it end the process, the log resumes.
"""

from typing import TYPE_CHECKING, Any

import msgspec

from noetl_core.domain.ids import LoopId, ShardId

if TYPE_CHECKING:
    from noetl_core.domain.envelope import Reference


class NoetlError(Exception):
    """The root of our errors."""


class RetryableError(NoetlError):
    """The same call may succeed later."""


class RejectedError(NoetlError):
    """The request is wrong: tell the user what to mend."""


class NotFoundError(RejectedError):
    """What was asked for is not there."""


class ConflictError(RejectedError):
    """What was asked for contradicts what is there."""


class ShardLostError(NoetlError):
    """Another process owns the shard: stop writing to it, do not retry."""

    def __init__(self, *, shard_ids: tuple[ShardId, ...]) -> None:
        super().__init__(f"shards {list(shard_ids)} were taken over by another process")
        self.shard_ids = shard_ids


class ReferenceNeeded(NoetlError):  # noqa: N818 - a request, not a failure
    """A template met a value that lives in the result store. Load it and ask again.

    It is what `reference` points at, or `part` of the collection of a loop, or, with a `loop_id`
    alone, the list of items that the loop has left undone.
    """

    def __init__(
        self,
        reference: "Reference | None" = None,
        *,
        part: int | None = None,
        loop_id: LoopId | None = None,
    ) -> None:
        super().__init__(f"{reference} part {part} loop {loop_id} is needed")
        self.reference = reference
        self.part = part
        self.loop_id = loop_id


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong with a playbook, and where."""

    message: str
    line: int = 0
    column: int = 0
    key: str = ""
    hint: str = ""
    severity: str = "error"


class PlaybookInvalidError(RejectedError):
    """The playbook cannot run. Every problem is listed, not only the first."""

    def __init__(self, problems: list[Problem], *, file: str = "") -> None:
        super().__init__("\n".join(f"{file}:{p.line}:{p.column}: {p.message}" for p in problems))
        self.problems = problems
        self.file = file


class TemplateError(RejectedError):
    """A template did not render: names the step, the field and the name, if one is unknown."""

    def __init__(self, message: str, *, step: str, field: str, name: str | None = None) -> None:
        super().__init__(f"step {step!r}, field {field!r}: {message}")
        self.reason = message
        self.step = step
        self.field = field
        self.name = name


class ToolError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a command failed, as it is recorded and as guards see it (`error.*`)."""

    kind: str
    message: str
    code: str = ""
    retryable: bool = False
    details: dict[str, Any] = {}
