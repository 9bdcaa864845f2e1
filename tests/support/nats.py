"""One nats-server with JetStream for the whole test run; every test finds it without streams."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import nats
import pytest

from noetl_core.bus import connection
from noetl_core.bus.connection import Bus, open_bus
from support.postgres import free_port, scratch_directory

_START_SECONDS_MAX = 60.0
PATIENT_SECONDS = 30.0
"""Longer than a busy machine keeps anybody waiting."""


class NatsServer:
    """A server process with a store directory. `stop`, `kill` and `start` keep port and store."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        command = [str(_binary()), "-js", "-sd", str(self.directory / "store")]
        command += ["-a", "127.0.0.1", "-p", str(self.port)]
        with (self.directory / "nats.log").open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)
        deadline = time.monotonic() + _START_SECONDS_MAX
        while not self._answers():
            assert time.monotonic() < deadline, (self.directory / "nats.log").read_text()
            time.sleep(0.02)

    def stop(self) -> None:
        self._end(hard=False)

    def kill(self) -> None:
        self._end(hard=True)

    def pause(self) -> None:
        """It keeps its connections and answers nothing, until `resume`."""
        os.kill(self.pid, signal.SIGSTOP)
        # Its threads stop one by one: without this one of them may answer once more.
        threads = Path(f"/proc/{self.pid}/task")
        while {_state_of(thread) for thread in threads.iterdir()} != {"T"}:
            time.sleep(0.01)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def wipe(self) -> None:
        """Lose everything that was stored; only while it is stopped."""
        assert self._process is None
        shutil.rmtree(self.directory / "store", ignore_errors=True)

    def _end(self, *, hard: bool) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill() if hard else process.terminate()
            process.wait(timeout=60)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                return probe.recv(4) == b"INFO"
        except OSError:
            return False


def _state_of(thread: Path) -> str:
    """As the kernel says it after the name, which may have anything in it."""
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


def _binary() -> Path:
    return Path(sys.executable).parent / "nats-server"


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    """The shared server. Do not stop it: a test that needs that uses `own_nats`."""
    with running_server() as server:
        yield server


@pytest.fixture
def own_nats() -> Iterator[NatsServer]:
    """A server that this test may stop, kill and wipe."""
    with running_server() as server:
        yield server


@contextmanager
def running_server() -> Iterator[NatsServer]:
    directory = scratch_directory("noetl-nats-")
    server = NatsServer(directory)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
async def nats_url(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a NATS without any stream, which is never away: on a busy machine it may be slow to
    connect or to acknowledge, and is waited for, while a service would go on without it."""
    impatient = Bus.wait_connected

    async def wait_connected(bus: Bus, seconds: float) -> bool:
        is_shared = nats_server.url in bus._servers
        return await impatient(bus, PATIENT_SECONDS if is_shared else seconds)

    monkeypatch.setattr(Bus, "wait_connected", wait_connected)
    monkeypatch.setattr(connection, "PUBLISH_SECONDS_MAX", PATIENT_SECONDS)
    client = await nats.connect(nats_server.url)
    try:
        jetstream = client.jetstream()
        for stream in await jetstream.streams_info():
            await jetstream.delete_stream(stream.config.name or "")
    finally:
        await client.close()
    return nats_server.url


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    async with open_bus(nats_url, name="test") as opened:
        assert await opened.wait_connected(PATIENT_SECONDS)
        yield opened
