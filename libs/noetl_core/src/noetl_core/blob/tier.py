"""A tier keeps payloads that are too large for the database. One file here per kind of tier."""

from typing import Protocol

from noetl_core.domain.errors import RejectedError, ToolError
from noetl_core.domain.ids import ExecutionId


class Tier(Protocol):
    """Bytes under a name. `put` of the same name replaces, so a retry overwrites itself."""

    name: str

    async def put(self, execution_id: ExecutionId, name: str, body: bytes) -> str:
        """Keep the body, safe against a crash once this returns; gives its URI."""
        ...

    async def get(self, uri: str) -> bytes:
        """Raises FileNotFoundError when nothing is there."""
        ...

    async def delete(self, uri: str) -> None:
        """What is gone already is no error."""
        ...


class ReferenceNotAvailableError(RejectedError):
    """A stored result cannot be read back: it was removed, or its bytes are not what was stored."""

    kind = "missing_reference"
    code = "REFERENCE_NOT_AVAILABLE"

    def __init__(self, reason: str, *, execution_id: ExecutionId) -> None:
        super().__init__(f"execution {execution_id}: {reason}")
        self.reason = reason
        self.execution_id = execution_id

    def as_tool_error(self) -> ToolError:
        return ToolError(kind=self.kind, code=self.code, message=str(self), retryable=True)


class ResultTooLargeError(RejectedError):
    """No configured tier takes a result of this size."""

    kind = "result_too_large"
    code = "RESULT_TOO_LARGE"

    def __init__(self, *, bytes_: int, bytes_max: int) -> None:
        super().__init__(
            f"a result of {bytes_} bytes does not fit into the database ({bytes_max} at most); "
            "set NOETL_STORE_DIR for larger ones"
        )

    def as_tool_error(self) -> ToolError:
        return ToolError(kind=self.kind, code=self.code, message=str(self))
