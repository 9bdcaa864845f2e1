"""A tier keeps payloads that are too large for the database. One file here per kind of tier."""

import hashlib
from typing import Protocol
from urllib.parse import quote

from noetl_core.domain.errors import RejectedError, ToolError
from noetl_core.domain.ids import ExecutionId

S3_TIERS = ("s3", "minio", "gcs")
"""What a tier in S3 may be called: they are all the same to us."""

_NAME_BYTES_MAX = 200
_BUCKETS = 100


class Tier(Protocol):
    """Bytes under a name. `put` of the same name replaces, so a retry overwrites itself."""

    name: str

    async def put(self, execution_id: ExecutionId, name: str, body: bytes) -> str:
        """Keep the body, safe against a crash once this returns; gives its URI."""
        ...

    async def get(self, uri: str) -> bytes:
        """Raises FileNotFoundError when nothing is there, StoreAwayError when nobody answers."""
        ...

    async def delete(self, uri: str) -> None:
        """What is gone already is no error."""
        ...


def path_of(execution_id: ExecutionId, name: str) -> str:
    """`{two digits}/{execution_id}/{name}`: where the payload of a command lies in a tier."""
    return f"{execution_id % _BUCKETS:02}/{execution_id}/{_file_name(name)}"


def _file_name(name: str) -> str:
    """`load.1/17#2` as one safe file name; a very long one by its digest."""
    quoted = quote(name, safe="")
    # "." stays as it is in a quoted name, and ".." would be a directory.
    if len(quoted) <= _NAME_BYTES_MAX and quoted.strip("."):
        return quoted
    return hashlib.sha256(name.encode()).hexdigest()


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
            "set NOETL_STORE_DIR or NOETL_S3_BUCKET for larger ones"
        )

    def as_tool_error(self) -> ToolError:
        return ToolError(kind=self.kind, code=self.code, message=str(self))
