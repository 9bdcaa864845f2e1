"""One SeaweedFS for the whole test run, started when the first test wants it; every test has a
prefix of its own. And a gate before it, which can be shut or made to misbehave."""

import asyncio
import contextlib
import itertools
import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest

from noetl_core.blob.file_place import FilePlace
from noetl_core.blob.place import Place
from noetl_core.blob.s3 import S3, S3Settings, location_of
from noetl_core.blob.s3_place import S3Place
from support.postgres import free_port, scratch_directory

ACCESS_KEY = "noetl"
SECRET_KEY = "not-to-be-told-7f3a"
BUCKET = "noetl-test"
COPIES_BYTES = 64 * 1024 * 1024

_START_SECONDS_MAX = 120.0
_PORTS = ("master", "volume", "filer", "s3")

_numbers = itertools.count(1)


class S3Server:
    """`weed server`: a master, a volume server, a filer and the S3 API in one process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Once more with other ports where somebody was quicker to listen on one of them."""
        try:
            self._start()
        except AssertionError:
            self.kill()
            self.port = free_port()
            self._start()

    def _start(self) -> None:
        (self.directory / "s3.json").write_text(json.dumps(_identities()))
        with (self.directory / "weed.log").open("ab") as output:
            self._process = subprocess.Popen(self._command(), stdout=output, stderr=output)
        deadline = time.monotonic() + _START_SECONDS_MAX
        while not self._answers():
            assert time.monotonic() < deadline, (self.directory / "weed.log").read_text()[-4000:]
            time.sleep(0.05)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(timeout=60)

    def _command(self) -> list[str]:
        command = [str(Path(sys.executable).with_name("weed")), "server", "-filer", "-s3"]
        command += [f"-dir={self.directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        command += [f"-s3.config={self.directory / 's3.json'}", "-s3.iam=false"]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
        command += ["-master.volumeSizeLimitMB=64", "-volume.max=200"]
        command += ["-volume.minFreeSpacePercent=1", "-master.electionTimeout=1s"]
        command += [f"-{part}.localSocket={self.directory / part}" for part in ("filer", "s3")]
        for part in _PORTS:
            port = self.port if part == "s3" else free_port()
            command += [f"-{part}.port={port}", f"-{part}.port.grpc={free_port()}"]
        return command

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.directory / "weed.log").read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"{self.url}/status", timeout=1):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False


def _identities() -> dict[str, object]:
    key = {"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    return {"identities": [{"name": "noetl", "credentials": [key], "actions": actions}]}


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """The shared server. A test that wants it away puts a gate before it."""
    directory = scratch_directory("noetl-s3-")
    server = S3Server(directory)
    try:
        server.start()
        # In a thread: whoever asks for this may be in an event loop.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, _first_bytes(server)).result()
        yield server
    finally:
        server.kill()
        shutil.rmtree(directory, ignore_errors=True)


async def _first_bytes(server: S3Server) -> None:
    """It makes its volumes for the first bytes, which takes some seconds."""
    async with S3(settings(server.url)) as s3:
        await s3.put(BUCKET, "first", b"x" * 100_000)


@pytest.fixture(scope="session")
async def s3(s3_server: S3Server) -> AsyncIterator[S3]:
    """A client that tests share: to make one takes longer than most of them."""
    async with S3(settings(s3_server.url)) as opened:
        yield opened


def settings(
    url: str, *, timeout_seconds: float = 30.0, secret_key: str = SECRET_KEY
) -> S3Settings:
    return S3Settings(
        endpoint=url, access_key=ACCESS_KEY, secret_key=secret_key, timeout_seconds=timeout_seconds
    )


@pytest.fixture
def s3_location(s3_server: S3Server) -> str:
    """A prefix of this test alone."""
    return f"s3://{BUCKET}/test-{next(_numbers)}"


@pytest.fixture
def s3_environment(s3_server: S3Server) -> dict[str, str]:
    """What services are told to reach it."""
    return {
        "NOETL_S3_ENDPOINT": s3_server.url,
        "NOETL_S3_ACCESS_KEY": ACCESS_KEY,
        "NOETL_S3_SECRET_KEY": SECRET_KEY,
        "NOETL_S3_BUCKET": BUCKET,
    }


@asynccontextmanager
async def open_s3_place(
    url: str, location: str, *, timeout_seconds: float = 30.0, copies_bytes: int = COPIES_BYTES
) -> AsyncIterator[S3Place]:
    async with S3(settings(url, timeout_seconds=timeout_seconds)) as s3:
        place = S3Place(s3, location_of(location), copies_bytes=copies_bytes)
        try:
            yield place
        finally:
            place.close()


@pytest.fixture
def s3_place(s3: S3, s3_location: str) -> Iterator[S3Place]:
    opened = S3Place(s3, location_of(s3_location), copies_bytes=COPIES_BYTES)
    yield opened
    opened.close()


@pytest.fixture(params=["directory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Both kinds of place: whatever holds of one must hold of the other."""
    if request.param == "directory":
        return FilePlace(tmp_path / "archive")
    opened: S3Place = request.getfixturevalue("s3_place")
    return opened


@pytest.fixture
def place_environment(request: pytest.FixtureRequest, place: Place) -> dict[str, str]:
    """How another process is told of the place."""
    own = {"NOETL_ARCHIVE_DIR": place.location}
    return own if place.tier == "pvc" else own | request.getfixturevalue("s3_environment")


Mood = Literal["open", "shut", "failing", "dropping", "silent"]


class Gate:
    """Passes on what comes, refuses it, answers with errors, hangs up, or says nothing at all."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._mood: Mood = "open"
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = free_port()
        self.requests = 0
        self.failures_left = 0
        """So many of the next connections get an error, whatever the mood."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def become(self, mood: Mood) -> None:
        self.spoil(mood)
        if mood != "shut" and self._server is None:
            self._server = await asyncio.start_server(self._meet, "127.0.0.1", self.port)

    def spoil(self, mood: Mood) -> None:
        """At once, from where nothing can be awaited. One that is shut stays so."""
        self._mood = mood
        for writer in list(self._writers):
            writer.transport.abort()
        if mood == "shut" and self._server is not None:
            self._server.close()
            self._server = None

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.requests += 1
        self._writers.add(writer)
        try:
            with contextlib.suppress(OSError):
                if self._mood == "failing" or self.failures_left:
                    self.failures_left = max(self.failures_left - 1, 0)
                    await _fail(reader, writer)
                elif self._mood == "open":
                    await self._pass_on(reader, writer)
                elif self._mood == "dropping":
                    await reader.readuntil(b"\r\n\r\n")
                else:
                    await reader.read(-1)
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers.add(back)
        try:
            tasks = [
                asyncio.create_task(_pipe(reader, back)),
                asyncio.create_task(_pipe(there, writer)),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
        finally:
            self._writers.discard(back)
            back.transport.abort()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()


async def _fail(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n")
    await writer.drain()
    await reader.read(65536)


@pytest.fixture
async def gate(s3_server: S3Server) -> AsyncIterator[Gate]:
    """A way to the server that this test may shut."""
    opened = Gate(s3_server.port)
    await opened.become("open")
    yield opened
    await opened.become("shut")
