"""A place keeps files under names: in a directory that all see, or in a bucket.

Whoever writes archives or reads them knows no more than this. What a method gives was said by the
place itself, after the call: nothing is taken from what we have sent. All of them raise
StoreAwayError when the place does not answer, and FileNotFoundError when it answers that there is
nothing under that name.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Protocol

from noetl_core.store.archive import File


class Place(Protocol):
    location: str
    """For people: the directory, or `s3://bucket/prefix`."""
    tier: str
    """What rows call this kind of place."""
    room_bytes: int | None
    """How much of it may be at hand at a time, more or less; None where all of it is."""

    def scratch(self) -> AbstractContextManager[Path]:
        """A directory on this machine, to make files in before they are put."""
        ...

    async def put(self, name: str, file: Path) -> None:
        """Move the file there; it is safe against a crash once this returns."""
        ...

    async def write(self, name: str, body: bytes) -> None:
        """The same with a few bytes that are at hand."""
        ...

    async def read(self, name: str) -> bytes:
        """All of a small file."""
        ...

    async def digest(self, name: str) -> str:
        """SHA-256 of the bytes that are there, read now."""
        ...

    async def names(self, prefix: str = "") -> list[str]:
        """What is there under the prefix, sorted. A prefix ends with a slash, or is empty."""
        ...

    async def delete(self, name: str) -> None:
        """What is gone already is no error."""
        ...

    def at_hand(self, files: Sequence[File]) -> AbstractAsyncContextManager[list[Path]]:
        """The files as files of this machine, in their order, for as long as the block lasts."""
        ...
