"""Files of archives that are read from S3: copied to this machine, and kept within a bound.

Many readers of one file copy it once; an error of the copy is told to all of them. A file that
somebody reads stays; of the others, the one that was read longest ago goes first. Whoever needs
more than there is room for waits until others have finished, and whoever needs more than all the
room gets it when nobody else reads: so the disk is used up to the bound, or up to what one question
needs. Every copy is checked by its digest.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from noetl_core.blob.away import StoreAwayError
from noetl_core.blob.metrics import ARCHIVE_COPIES_BYTES
from noetl_core.blob.scratch import scratch_directory
from noetl_core.store.archive import File

COPIES_AT_ONCE = 4

Fetch = Callable[[File, Path], Awaitable[str]]
"""Writes a file to a path, and gives the digest of what it has written."""


class CopyDamagedError(StoreAwayError):
    """What came is not what was archived, though it may be on the way that it was damaged."""


class LocalCopies:
    def __init__(self, fetch: Fetch, *, parent: Path, bytes_max: int) -> None:
        self._fetch = fetch
        self._parent = parent
        self._bytes_max = bytes_max
        self._resources = ExitStack()
        self._directory: Path | None = None
        self._there: OrderedDict[str, None] = OrderedDict()
        """The digests of what is on the disk, the one that was read last at the end."""
        self._sizes: dict[str, int] = {}
        """Of what is on the disk, and of what is on its way to a reader."""
        self._readers: Counter[str] = Counter()
        self._copying: dict[str, asyncio.Task[None]] = {}
        self._limit = asyncio.Semaphore(COPIES_AT_ONCE)
        self._door = asyncio.Lock()
        self._left = asyncio.Event()

    def close(self) -> None:
        for task in self._copying.values():
            task.cancel()
        self._resources.close()

    @asynccontextmanager
    async def at_hand(self, files: Sequence[File]) -> AsyncIterator[list[Path]]:
        wanted = {file.sha256: file for file in files}
        await self._enter(wanted)
        try:
            await asyncio.gather(*(self._copied(file) for file in wanted.values()))
            yield [self._path(file.sha256) for file in files]
        finally:
            self._leave(wanted)

    async def _enter(self, wanted: dict[str, File]) -> None:
        """Wait for room, in the order in which we came, and take it."""
        async with self._door:
            while self._readers and self._bytes_read(wanted) > self._bytes_max:
                self._left.clear()
                await self._left.wait()
            self._readers.update(wanted.keys())
            self._sizes.update({digest: file.bytes for digest, file in wanted.items()})
            self._make_room()

    def _leave(self, wanted: dict[str, File]) -> None:
        self._readers.subtract(wanted.keys())
        self._readers += Counter()  # without those that nobody reads any more
        for digest in wanted:
            self._forget(digest)
        self._make_room()
        self._left.set()

    def _bytes_read(self, wanted: dict[str, File]) -> int:
        others = sum(self._sizes[one] for one in self._readers if one not in wanted)
        return others + sum(file.bytes for file in wanted.values())

    def _make_room(self) -> None:
        total = sum(self._sizes.values())
        for digest in [one for one in self._there if one not in self._readers]:
            if total <= self._bytes_max:
                break
            total -= self._sizes[digest]
            del self._there[digest]
            self._forget(digest)
            self._path(digest).unlink(missing_ok=True)
        ARCHIVE_COPIES_BYTES.set(total)

    def _forget(self, digest: str) -> None:
        """Its size, unless it takes up room."""
        is_used = digest in self._there or digest in self._readers or digest in self._copying
        if not is_used:
            self._sizes.pop(digest, None)

    async def _copied(self, file: File) -> None:
        digest = file.sha256
        # Somebody who tidies up the machine may have removed what was not read for days.
        if digest in self._there and self._path(digest).exists():
            self._there.move_to_end(digest)
            return
        task = self._copying.get(digest)
        if task is None:
            task = self._copying[digest] = asyncio.create_task(self._copy(file))
            task.add_done_callback(lambda done: self._end(digest, done))
        # One reader that goes away takes nothing from the others.
        await asyncio.shield(task)

    def _end(self, digest: str, task: asyncio.Task[None]) -> None:
        del self._copying[digest]
        if not task.cancelled() and task.exception() is None:
            self._there[digest] = None
        self._forget(digest)

    async def _copy(self, file: File) -> None:
        path = self._path(file.sha256)
        coming = path.with_suffix(".coming")
        async with self._limit:
            try:
                coming.parent.mkdir(parents=True, exist_ok=True)
                digest = await self._fetch(file, coming)
                if digest != file.sha256:
                    raise CopyDamagedError(f"{file.path} is not what was archived")
                coming.replace(path)
            except FileNotFoundError:
                raise
            except OSError as error:
                raise StoreAwayError(f"no copy of {file.path} could be made: {error}") from error
            finally:
                coming.unlink(missing_ok=True)

    def _path(self, digest: str) -> Path:
        if self._directory is None:
            scratch = scratch_directory(self._parent, prefix="noetl-archive-")
            self._directory = self._resources.enter_context(scratch)
        return self._directory / f"{digest}.parquet"
