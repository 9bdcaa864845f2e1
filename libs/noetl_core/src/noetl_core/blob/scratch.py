"""A directory for files on their way, which is gone afterwards, also when its process was killed.

Whoever makes one holds a lock on the file beside it for as long as it lives, and the kernel takes
that lock away with the process. So the next who makes one knows which of the others are orphans.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK = ".lock"


@contextmanager
def scratch_directory(parent: Path, *, prefix: str) -> Iterator[Path]:
    parent.mkdir(parents=True, exist_ok=True)
    _remove_orphans(parent, prefix)
    descriptor, lock = _locked(parent, prefix)
    directory = _directory_of(lock)
    try:
        directory.mkdir()
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(parent: Path, prefix: str) -> tuple[int, Path]:
    """A new file that we have locked. Somebody may take it for an orphan before we have."""
    while True:
        descriptor, name = tempfile.mkstemp(prefix=prefix, suffix=_LOCK, dir=parent)
        # A file system without locks has no orphans that anybody could recognise, either.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if Path(name).exists():
            return descriptor, Path(name)
        os.close(descriptor)


def _remove_orphans(parent: Path, prefix: str) -> None:
    for lock in parent.glob(f"{prefix}*{_LOCK}"):
        with suppress(OSError), lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(_directory_of(lock), ignore_errors=True)
            lock.unlink()


def _directory_of(lock: Path) -> Path:
    return lock.with_name(lock.name.removesuffix(_LOCK))
