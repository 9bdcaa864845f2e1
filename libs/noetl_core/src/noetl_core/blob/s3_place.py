"""A bucket as a place. Whoever reads gets copies on the own disk: DuckDB needs files."""

import asyncio
import hashlib
import tempfile
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path

from noetl_core.blob.local_copies import LocalCopies
from noetl_core.blob.s3 import S3, Location
from noetl_core.blob.scratch import scratch_directory
from noetl_core.store.archive import File


class S3Place:
    tier = "s3"

    def __init__(self, s3: S3, at: Location, *, copies_bytes: int) -> None:
        self._s3 = s3
        self._at = at
        self.location = str(at)
        self._directory = Path(tempfile.gettempdir())
        self.room_bytes: int | None = copies_bytes
        self._copies = LocalCopies(self._fetch, parent=self._directory, bytes_max=copies_bytes)

    def close(self) -> None:
        self._copies.close()

    def scratch(self) -> AbstractContextManager[Path]:
        return scratch_directory(self._directory, prefix="noetl-scratch-")

    async def put(self, name: str, file: Path) -> None:
        await self._s3.put(self._at.bucket, self._at.key(name), file)
        await asyncio.to_thread(file.unlink)

    async def write(self, name: str, body: bytes) -> None:
        await self._s3.put(self._at.bucket, self._at.key(name), body)

    async def read(self, name: str) -> bytes:
        body = bytearray()
        await self._s3.read(self._at.bucket, self._at.key(name), body.extend)
        return bytes(body)

    async def digest(self, name: str) -> str:
        found = hashlib.sha256()
        await self._s3.read(self._at.bucket, self._at.key(name), found.update)
        return found.hexdigest()

    async def names(self, prefix: str = "") -> list[str]:
        keys = await self._s3.names(self._at.bucket, self._at.key(prefix))
        return [key.removeprefix(self._at.key("")) for key in keys]

    async def delete(self, name: str) -> None:
        await self._s3.delete(self._at.bucket, self._at.key(name))

    def at_hand(self, files: Sequence[File]) -> AbstractAsyncContextManager[list[Path]]:
        return self._copies.at_hand(files)

    async def _fetch(self, file: File, target: Path) -> str:
        found = hashlib.sha256()
        with target.open("wb") as output:

            def take(chunk: bytes) -> None:
                found.update(chunk)
                output.write(chunk)

            await self._s3.read(self._at.bucket, self._at.key(file.path), take)
        return found.hexdigest()
