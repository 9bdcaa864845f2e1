"""The `pvc` tier: a directory that every process sees, on one machine or on a shared volume.

    {root}/{two digits}/{execution_id}/{name}

A payload is written under a temporary name, synced, and renamed: a reader sees all of it or
nothing, and a crash leaves at most a temporary file. URIs are relative to the root, because the
volume may be mounted elsewhere in another process.
"""

import asyncio
import hashlib
from pathlib import Path
from urllib.parse import quote

from noetl_core.blob import durable
from noetl_core.domain.ids import ExecutionId

_SCHEME = "pvc:"
_NAME_BYTES_MAX = 200
_BUCKETS = 100


class FileTier:
    name = "pvc"

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)

    async def put(self, execution_id: ExecutionId, name: str, body: bytes) -> str:
        relative = Path(f"{execution_id % _BUCKETS:02}", str(execution_id), _file_name(name))
        await asyncio.to_thread(durable.write, self._root / relative, body)
        return f"{_SCHEME}{relative}"

    async def get(self, uri: str) -> bytes:
        return await asyncio.to_thread(self.path(uri).read_bytes)

    async def delete(self, uri: str) -> None:
        await asyncio.to_thread(self.path(uri).unlink, missing_ok=True)

    def path(self, uri: str) -> Path:
        """Where it lies, for a reader that needs no copy of it."""
        path = self._root / uri.removeprefix(_SCHEME)
        if not uri.startswith(_SCHEME) or not path.resolve().is_relative_to(self._root.resolve()):
            raise FileNotFoundError(uri)
        return path


def _file_name(name: str) -> str:
    """`load.1/17#2` as one safe file name; a very long one by its digest."""
    quoted = quote(name, safe="")
    # "." stays as it is in a quoted name, and ".." would be a directory.
    if len(quoted) <= _NAME_BYTES_MAX and quoted.strip("."):
        return quoted
    return hashlib.sha256(name.encode()).hexdigest()
