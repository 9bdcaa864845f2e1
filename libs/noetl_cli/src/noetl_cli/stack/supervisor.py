"""The supervisor: starts the parts in order, starts again what dies, ends all of it in reverse.

    nats, postgres -> migrations -> engine (or one process a service), workers

Every part is a child of this process and dies with it, even with a kill -9. What a dead supervisor
left behind all the same is found by its records (pid and start time) and ended by the next one.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from noetl_cli.failure import EXIT_USAGE, CommandFailed
from noetl_cli.stack.child import Child
from noetl_cli.stack.data_dir import DataDir
from noetl_cli.stack.environment import service_environment
from noetl_cli.stack.migrations import apply_migrations
from noetl_cli.stack.nats import NatsServer
from noetl_cli.stack.ports import HOST, choose_ports, is_free
from noetl_cli.stack.postgres import PostgresCluster
from noetl_cli.stack.processes import end, record_of
from noetl_cli.stack.program import Program
from noetl_cli.stack.services import on_free_port, service_names, service_programs
from noetl_cli.stack.state import StackState, read_state, write_state

Report = Callable[[str], None]

RESTART_DELAYS_SECONDS = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Before the first restart in a row, the second, ...; the last one holds for all that follow."""

DEATHS_IN_A_ROW_MAX = 4
"""After so many a part will hardly recover: nobody needs to wait for it, but we go on trying."""

_STEADY_SECONDS = 10.0
"""A part that lived this long has recovered: its next restart is a first one again."""

_DELAY_COUNT = len(RESTART_DELAYS_SECONDS)
_LEFTOVER_SECONDS = 5.0
_LOG_CHECK_SECONDS = 10.0
_DATABASE_POLL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class StackOptions:
    data_dir: Path
    port: int = 0
    postgres_dsn: str = ""
    nats_url: str = ""
    workers: int = 1
    is_separate: bool = False
    """One process per service, instead of one for all but the workers."""
    brokers: int = 1
    projections: int = 1
    restarts: bool = True
    is_discarded: bool = False
    """The data directory is removed afterwards: nothing has to survive, not even a clean stop."""


@contextlib.asynccontextmanager
async def open_stack(options: StackOptions, report: Report) -> AsyncIterator["Supervisor"]:
    """A running stack. When the block ends, all parts have ended."""
    data_dir = DataDir(options.data_dir)
    data_dir.create()
    with data_dir.locked():
        await _end_leftovers(data_dir, report)
        data_dir.clear_scratch()
        supervisor = Supervisor(options, data_dir, report)
        try:
            await supervisor.start()
            yield supervisor
        finally:
            await supervisor.stop()


class Supervisor:
    def __init__(self, options: StackOptions, data_dir: DataDir, report: Report) -> None:
        self._options = options
        self._data_dir = data_dir
        self._report = report
        self._record = record_of("supervisor", os.getpid())
        self._is_ready = False
        self.hopeless: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Says how the first part ended that dies again and again, and so will not recover."""
        names = service_names(
            workers=options.workers,
            is_separate=options.is_separate,
            brokers=options.brokers,
            projections=options.projections,
        )
        ports = _ports(options, data_dir, names)
        self._gateway_port = ports["gateway"]
        self._health_ports = {name: ports[name] for name in names}
        self._postgres = PostgresCluster(
            data_dir.postgres, port=ports["postgres"], is_discarded=options.is_discarded
        )
        self._nats = NatsServer(data_dir.nats, port=ports["nats"])
        self._foundation: list[Child] = []
        self._services: list[Child] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def state(self) -> StackState:
        children = [*self._foundation, *self._services]
        return StackState(
            url=f"http://{HOST}:{self._gateway_port}",
            dsn=self._options.postgres_dsn or self._postgres.dsn,
            nats_url=self._options.nats_url or self._nats.url,
            data_dir=str(self._data_dir.root),
            supervisor=self._record,
            parts=tuple(child.record for child in children if child.record is not None),
            metrics={
                child.name: f"http://{HOST}:{child.program.health_port}/metrics"
                for child in self._services
            },
            is_ready=self._is_ready,
        )

    async def start(self) -> None:
        """Start everything; when this returns, the gateway answers."""
        for program in self._service_programs():
            await self._launch(program, self._services)
        await self._start_foundation()
        await apply_migrations(self.state.dsn)
        for child in self._services:
            child.go()
        # The first of them is, or holds, the gateway.
        await self._services[0].ready()
        self._keep_all(self._services)
        self._tasks.append(asyncio.create_task(self._bound_logs()))
        self._is_ready = True
        self._write_state()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        discard = self._options.is_discarded
        await asyncio.gather(*(child.stop(is_discarded=discard) for child in self._services))
        await asyncio.gather(*(child.stop(is_discarded=discard) for child in self._foundation))
        self._data_dir.state_file.unlink(missing_ok=True)

    async def _start_foundation(self) -> None:
        if not self._options.nats_url:
            await self._launch(self._nats.program(), self._foundation)
        if not self._options.postgres_dsn:
            await self._postgres.create()
            await self._launch(self._postgres.program(), self._foundation)
        for child in self._foundation:
            await child.ready()
        self._keep_all(self._foundation)

    def _service_programs(self) -> list[Program]:
        return service_programs(
            service_environment(os.environ, self._data_dir, self._places()),
            stack=self._data_dir.fingerprint,
            gateway_port=self._gateway_port,
            health_ports=self._health_ports,
        )

    def _places(self) -> dict[str, str]:
        return {
            "NOETL_POSTGRES_DSN": self.state.dsn,
            "NOETL_NATS_URL": self.state.nats_url,
            "NOETL_GATEWAY_HOST": HOST,
            "NOETL_GATEWAY_PORT": str(self._gateway_port),
            "NOETL_HEALTH_HOST": HOST,
            "TMPDIR": str(self._data_dir.scratch),
        }

    async def _launch(self, program: Program, group: list[Child]) -> None:
        child = Child(program, self._data_dir.logs)
        child.bound_log()
        group.append(child)
        await child.start()
        self._write_state()

    def _keep_all(self, children: list[Child]) -> None:
        """From here on a death is mended; before, it is a start that failed."""
        self._tasks += [asyncio.create_task(self._keep(child)) for child in children]

    async def _keep(self, child: Child) -> None:
        """Start a part again when it dies: at once, then ever more slowly while it keeps dying."""
        loop = asyncio.get_running_loop()
        deaths = 0
        while True:
            started_at = loop.time()
            code = await child.ended()
            deaths = 1 if loop.time() - started_at > _STEADY_SECONDS else deaths + 1
            self._tell(child, code, deaths)
            if not self._options.restarts:
                return
            await asyncio.sleep(RESTART_DELAYS_SECONDS[min(deaths, _DELAY_COUNT) - 1])
            try:
                await self._restart(child)
            except OSError as error:
                # No process or no disk to be had: the next round finds it dead, and tries again.
                self._report(f"{child.name} could not be started: {error}")

    def _tell(self, child: Child, code: int, deaths: int) -> None:
        obituary = child.obituary(code)
        self._report(
            f"{obituary} It {'starts' if self._options.restarts else 'is not started'} again."
        )
        # Whoever is killed is not to blame: one that ends by itself, again and again, is.
        if code >= 0 and deaths >= DEATHS_IN_A_ROW_MAX and not self.hopeless.done():
            self.hopeless.set_result(obituary)

    async def _restart(self, child: Child) -> None:
        if child in self._services:
            await self._database_answers()
            child.program = on_free_port(child.program)
        await child.start()
        child.go()
        self._write_state()

    async def _database_answers(self) -> None:
        """Without its database a service could only die again: let Postgres come back first."""
        while not self._options.postgres_dsn and not await self._postgres.is_ready():  # noqa: ASYNC110
            await asyncio.sleep(_DATABASE_POLL_SECONDS)

    async def _bound_logs(self) -> None:
        while True:
            await asyncio.sleep(_LOG_CHECK_SECONDS)
            for child in (*self._foundation, *self._services):
                child.bound_log()

    def _write_state(self) -> None:
        write_state(self._data_dir, self.state)


def _ports(options: StackOptions, data_dir: DataDir, services: list[str]) -> dict[str, int]:
    if options.port and not is_free(options.port):
        raise CommandFailed(
            f"port {options.port} is in use: name another --port.", exit_code=EXIT_USAGE
        )
    kept = data_dir.kept_ports()
    ports = choose_ports(["postgres", "nats", "gateway", *services], kept)
    data_dir.keep_ports(kept | ports)
    return ports | ({"gateway": options.port} if options.port else {})


async def _end_leftovers(data_dir: DataDir, report: Report) -> None:
    """We hold the lock now: what its last holder recorded and still runs, runs for nobody."""
    state = read_state(data_dir)
    if state is None:
        return
    for record in state.parts:
        number = signal.SIGQUIT if record.name == "postgres" else signal.SIGTERM
        if await end(record, ask_with=number, grace_seconds=_LEFTOVER_SECONDS):
            report(f"ended {record.name} (pid {record.pid}), left by a supervisor that was killed")
    data_dir.state_file.unlink(missing_ok=True)
