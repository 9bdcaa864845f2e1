"""The `pvc` tier: a directory that every process sees, on one machine or on a shared volume.

    {root}/{two digits}/{execution_id}/{name}

A payload is written under a temporary name, synced, and renamed: a reader sees all of it or
nothing, and a crash leaves at most a temporary file. URIs are relative to the root, because the
volume may be mounted elsewhere in another process.
"""

import asyncio
from pathlib import Path

from noetl_core.blob import durable
from noetl_core.blob.away import StoreAwayError
from noetl_core.blob.tier import path_of
from noetl_core.domain.ids import ExecutionId

_SCHEME = "pvc:"


class FileTier:
    name = "pvc"

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)

    async def put(self, execution_id: ExecutionId, name: str, body: bytes) -> str:
        relative = path_of(execution_id, name)
        try:
            await asyncio.to_thread(durable.write, self._root / relative, body)
        except OSError as error:
            raise StoreAwayError(f"{self._root}: {error.strerror or error}") from error
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
