"""The data directory of a stack: where everything of it lies, and what is made once and kept.

postgres/    the database cluster          nats/     the streams of JetStream
store/       results too large for a row   logs/     one file a part
ports.json   ports, chosen once            key       encrypts credentials (0600)
dev.json     what runs now                 lock      held while a supervisor lives
tmp/         scratch of the services, emptied at every start
"""

import base64
import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path

from noetl_cli.failure import EXIT_USAGE, CommandFailed

_KEY_BYTES = 32


class DataDir:
    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()
        self.postgres = self.root / "postgres"
        self.nats = self.root / "nats"
        self.store = self.root / "store"
        self.logs = self.root / "logs"
        self.scratch = self.root / "tmp"
        self.state_file = self.root / "dev.json"
        self._ports_file = self.root / "ports.json"
        self._key_file = self.root / "key"
        self._lock_file = self.root / "lock"

    @property
    def fingerprint(self) -> str:
        """Short, and another one for every directory of every machine that shares a Postgres."""
        return f"{zlib.crc32(f'{socket.gethostname()}:{self.root}'.encode()):08x}"

    def create(self) -> None:
        try:
            for folder in (self.root, self.nats, self.store, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandFailed(
                f"cannot use {self.root} as data directory: {error.strerror}. "
                "Name another one with --data-dir.",
                exit_code=EXIT_USAGE,
            ) from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One supervisor at a time. The kernel drops the lock with the process, however it dies."""
        descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise CommandFailed(
                f"{self.root} is in use by another `noetl dev`: stop that one "
                f"(`noetl dev ps --data-dir {self.root}` lists it) or name another --data-dir.",
                exit_code=EXIT_USAGE,
            ) from error
        try:
            yield
        finally:
            os.close(descriptor)

    def clear_scratch(self) -> None:
        """A process that was killed leaves its temporary files: nobody reads them again."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(exist_ok=True)

    def kept_ports(self) -> dict[str, int]:
        try:
            kept = json.loads(self._ports_file.read_text())
        except (OSError, ValueError):
            return {}
        return {name: port for name, port in kept.items() if isinstance(port, int)}

    def keep_ports(self, ports: dict[str, int]) -> None:
        write_atomically(self._ports_file, json.dumps(ports))

    def encryption_key(self) -> str:
        """Made at the first start: with another key, the credentials here could not be read."""
        if not self._key_file.exists():
            key = base64.b64encode(secrets.token_bytes(_KEY_BYTES)).decode()
            write_atomically(self._key_file, key)
        return self._key_file.read_text().strip()


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the old text or the new one; a crash leaves one of the two."""
    fresh = path.with_name(f"{path.name}.new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def default_data_dir() -> Path:
    """`$XDG_DATA_HOME/noetl/dev`, as a rule `~/.local/share/noetl/dev`."""
    home = os.environ.get("XDG_DATA_HOME")
    base = Path(home) if home else Path.home() / ".local" / "share"
    return base / "noetl" / "dev"
