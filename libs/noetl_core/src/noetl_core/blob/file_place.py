"""A directory as a place: on one machine, or on a volume that every process has mounted."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

from noetl_core.blob import durable
from noetl_core.blob.away import StoreAwayError
from noetl_core.blob.scratch import scratch_directory
from noetl_core.store.archive import File

_HIDDEN = "."
"""What is still being made has a name that begins like this, and is not listed."""

T = TypeVar("T")


class FilePlace:
    tier = "pvc"
    room_bytes: int | None = None

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)
        self.location = str(root)

    def scratch(self) -> AbstractContextManager[Path]:
        # Beside the files: where they have room, what they are made of has room too.
        return scratch_directory(self._root, prefix=f"{_HIDDEN}scratch-")

    async def put(self, name: str, file: Path) -> None:
        await self._do(lambda: self._keep(name, lambda path: durable.move(file, path)))

    async def write(self, name: str, body: bytes) -> None:
        await self._do(lambda: self._keep(name, lambda path: durable.write(path, body)))

    async def read(self, name: str) -> bytes:
        return await self._do((self._root / name).read_bytes)

    async def digest(self, name: str) -> str:
        return await self._do(lambda: durable.digest(self._root / name))

    async def names(self, prefix: str = "") -> list[str]:
        return await self._do(lambda: self._names(prefix))

    async def delete(self, name: str) -> None:
        await self._do(lambda: self._delete(name))

    @asynccontextmanager
    async def at_hand(self, files: Sequence[File]) -> AsyncIterator[list[Path]]:
        """They are at hand already."""
        paths = [self._root / file.path for file in files]
        missing = await self._do(lambda: [path for path in paths if not path.is_file()])
        if missing:
            raise FileNotFoundError(str(missing[0]))
        yield paths

    async def _do(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreAwayError(f"{self.location}: {error.strerror or error}") from error

    def _keep(self, name: str, place: Callable[[Path], None]) -> None:
        path = self._root / name
        is_new = not path.parent.is_dir()
        place(path)
        if is_new:
            durable.sync(path.parent.parent)

    def _names(self, prefix: str) -> list[str]:
        found = (path.relative_to(self._root) for path in (self._root / prefix).rglob("*"))
        return sorted(
            path.as_posix()
            for path in found
            if not any(part.startswith(_HIDDEN) for part in path.parts)
            and (self._root / path).is_file()
        )

    def _delete(self, name: str) -> None:
        path = self._root / name
        path.unlink(missing_ok=True)
        # A directory is only there for what is in it.
        with suppress(OSError):
            for parent in path.relative_to(self._root).parents[:-1]:
                (self._root / parent).rmdir()
