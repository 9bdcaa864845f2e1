"""Files that survive a power cut: whoever looks sees all of one or nothing. Everything blocks."""

import hashlib
import os
import secrets
import shutil
from pathlib import Path

_DIGEST_BYTES = 1024 * 1024


def write(path: Path, body: bytes) -> None:
    temporary = _temporary(path)
    try:
        temporary.write_bytes(body)
        _take_place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def move(source: Path, path: Path) -> None:
    """Give the file its place; copied only where the two are on different file systems."""
    temporary = _temporary(path)
    try:
        shutil.move(source, temporary)
        _take_place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """A file, or the names in a directory, survive a power cut from here on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_DIGEST_BYTES):
            found.update(chunk)
    return found.hexdigest()


def _temporary(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by the process: on a shared volume every container's has the same id.
    return path.with_name(f".{secrets.token_hex(8)}.tmp")


def _take_place(temporary: Path, path: Path) -> None:
    sync(temporary)
    temporary.replace(path)
    # The name itself must survive a power cut, else what refers to it would lead nowhere.
    sync(path.parent)
