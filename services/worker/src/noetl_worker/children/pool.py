"""A pool of warm children. A call has a child to itself; a killed one loses only its own call."""

import asyncio
import os
import signal
import struct
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import structlog

CHILD = Path(__file__).with_name("child.py")
ANSWER_BYTES_MAX = 256 * 1024 * 1024

# What code needs to run and to reach the network. The rest of our environment holds secrets.
_ENVIRONMENT = (
    "PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NO_PROXY", "no_proxy",
)  # fmt: skip
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode

log = structlog.get_logger()


class ChildDiedError(Exception):
    """The process ended in the middle of a call."""

    def __init__(self, returncode: int | None) -> None:
        super().__init__(_how(returncode))
        self.returncode = returncode


class _Child:
    """One process and its two pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def call(self, request: bytes) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(struct.pack(">I", len(request)) + request)
            await self._process.stdin.drain()
            head = await self._process.stdout.readexactly(4)
            size = struct.unpack(">I", head)[0]
            if size > ANSWER_BYTES_MAX:
                raise ChildDiedError(None)
            answer: dict[str, Any] = _decode(await self._process.stdout.readexactly(size))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ChildDiedError(await self._process.wait()) from error
        return answer

    async def end(self) -> None:
        """Kill it and everything it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None


class ChildPool:
    """At most `size` children, started when they are first needed and kept."""

    def __init__(self, *, size: int, memory_mb: int, cpu_seconds: int) -> None:
        self.size = size
        self.busy = 0
        self._places = asyncio.Semaphore(size)
        self._idle: list[_Child] = []
        self._memory_mb = memory_mb
        self._cpu_seconds = cpu_seconds
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self.waiting = 0
        """Calls that wait for a child: a sign to take no more work for now."""

    async def call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run one request. Raises ChildDiedError; when cancelled, the child is killed."""
        body = _encode({**request, "cpu_seconds": self._cpu_seconds})
        self.waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.waiting -= 1
        self.busy += 1
        try:
            return await self._call_one(body)
        finally:
            self.busy -= 1
            self._places.release()

    async def _call_one(self, body: bytes) -> dict[str, Any]:
        child = await self._take()
        try:
            answer = await child.call(body)
        except BaseException:
            # Also when we are cancelled: the code may be in an endless loop, and its answer must
            # not be read as that of the next call. A fresh child takes its place.
            await asyncio.shield(child.end())
            raise
        self._idle.append(child)
        return answer

    async def _take(self) -> _Child:
        while self._idle:
            child = self._idle.pop()
            if child.is_alive:
                return child
        return await self._spawn()

    async def _spawn(self) -> _Child:
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="noetl-python-")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-X", "utf8", str(CHILD), str(self._memory_mb),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=child_environment(self._directory.name),
            cwd=self._directory.name,
            start_new_session=True,
        )  # fmt: skip
        log.debug("child.started", pid=process.pid)
        return _Child(process)

    async def close(self) -> None:
        await asyncio.gather(*(child.end() for child in self._idle))
        self._idle.clear()
        if self._directory is not None:
            self._directory.cleanup()


def child_environment(home: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    # A proxy with a login in it is a secret.
    proxies = {n: os.environ[n] for n in _PROXIES if n in os.environ and "@" not in os.environ[n]}
    return kept | proxies | {"HOME": home, "TMPDIR": home}


def _how(returncode: int | None) -> str:
    if returncode is None:
        return "its answer was too large"
    if returncode < 0:
        return f"it was ended by {signal.Signals(-returncode).name}"
    return f"it ended with exit code {returncode}"
