"""The one life that every service has.

    config -> logs -> telemetry -> health -> start(service) -> ready
       SIGTERM -> not ready -> loops end after their turn -> on_stop -> resources close -> exit 0
       a task that dies -> the same way down -> its traceback, exit 1

Nothing authoritative lives in memory, so dying is always safe and never worth avoiding: the log
resumes. Only errors that pass by themselves (resilience.is_transient) are waited out.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import structlog
import uvloop

from noetl_core.bus.cancel import cancel
from noetl_core.process.complaint import Complaint
from noetl_core.process.config import Config, default_instance, load_or_exit
from noetl_core.process.health import serve_health
from noetl_core.process.log import set_up_logs
from noetl_core.process.metrics import TURN_MS
from noetl_core.process.resilience import backoff_seconds, is_transient
from noetl_core.process.telemetry import set_up_telemetry

STOP_SECONDS_MAX = 10.0
_MEASURED_SECONDS = 1.0
"""Turns that come at least so far apart are measured; the others are too many, or only wait."""

C = TypeVar("C", bound=Config)
T = TypeVar("T")

log = structlog.get_logger()


class Service(Generic[C]):
    """What `start` composes: resources, loops, long-running tasks and what to do at the end."""

    def __init__(self, name: str, config: C) -> None:
        self.name = name
        self.config = (
            config
            if config.instance
            else msgspec.structs.replace(config, instance=default_instance(name))
        )
        self.stopping = asyncio.Event()
        self._died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wakes: list[asyncio.Event] = []
        self._loops: set[asyncio.Task[None]] = set()
        self._backgrounds: set[asyncio.Task[None]] = set()
        self._callbacks = AsyncExitStack()
        self._resources = AsyncExitStack()

    async def open(self, resource: AbstractAsyncContextManager[T]) -> T:
        """Enter it now; it is left at the end, the last one first."""
        return await self._resources.enter_async_context(resource)

    def every(
        self,
        seconds: float,
        turn: Callable[[], Awaitable[object]],
        *,
        wake: asyncio.Event | None = None,
        name: str | None = None,
    ) -> None:
        """Run `turn` again and again: at once after one that found work, else in `seconds` or
        when `wake` is set. Errors that pass by themselves are waited out; any other is the end.
        """
        if wake is not None:
            self._wakes.append(wake)
        loop = _Loop(self.stopping, seconds, turn, wake, name or _name_of(turn))
        self._watch(self._loops, loop.run(), loop.name)

    def background(self, run: Callable[[], Awaitable[None]], *, name: str) -> None:
        """A task that lasts as long as the service. It is cancelled after the on_stop callbacks."""

        async def last() -> None:
            await run()
            if not self.stopping.is_set():
                raise RuntimeError(f"the background task {name!r} ended, but it must not")

        self._watch(self._backgrounds, last(), name)

    def on_stop(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Run at the end, after the loops and before the resources close; the last one first."""
        self._callbacks.push_async_callback(_attempt, callback)

    def _watch(
        self, group: set[asyncio.Task[None]], work: Coroutine[Any, Any, None], name: str
    ) -> None:
        task = asyncio.create_task(work, name=f"{self.name}.{name}")
        group.add(task)
        task.add_done_callback(group.discard)
        task.add_done_callback(self._notice)

    def _notice(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._died.done():
            self._died.set_exception(error)

    async def wait_for_death(self) -> None:
        """Raises what killed a task of this service; lasts forever as long as all is well."""
        await asyncio.shield(self._died)

    def begin_stop(self) -> None:
        self.stopping.set()
        for wake in self._wakes:
            wake.set()

    async def _stop(self) -> None:
        self.begin_stop()
        async with self._resources:
            try:
                if self._loops:
                    await asyncio.wait(self._loops, timeout=STOP_SECONDS_MAX)
                await cancel(self._loops)
                await self._callbacks.aclose()
            finally:
                await cancel(self._backgrounds)
        if self._died.done():
            self._died.exception()  # seen: no warning that nobody asked for it


class _Loop:
    """One `every`: the turn, and what stands between two of them."""

    def __init__(
        self,
        stopping: asyncio.Event,
        seconds: float,
        turn: Callable[[], Awaitable[object]],
        wake: asyncio.Event | None,
        name: str,
    ) -> None:
        self.name = name
        self._stopping = stopping
        self._seconds = seconds
        self._turn = turn
        self._wake = wake
        self._complaint = Complaint()

    async def run(self) -> None:
        while not self._stopping.is_set():
            # Before the turn, not after: a wake-up that comes during the turn is for the next one.
            if self._wake is not None:
                self._wake.clear()
            begun = time.perf_counter()
            try:
                busy = await self._turn()
            except Exception as error:
                if not is_transient(error):
                    raise
                await self._back_off(error)
                continue
            self._recover()
            if self._seconds >= _MEASURED_SECONDS:
                TURN_MS.record((time.perf_counter() - begun) * 1000, {"loop": self.name})
            if busy:
                await asyncio.sleep(0)
            else:
                await _wait(self._wake or self._stopping, self._seconds)

    async def _back_off(self, error: Exception) -> None:
        if self._complaint.failed():
            log.warning(
                "loop.delayed",
                loop=self.name,
                failures=self._complaint.failures,
                error=f"{type(error).__name__}: {error}",
            )
        await _wait(self._stopping, backoff_seconds(self._complaint.failures))

    def _recover(self) -> None:
        if failures := self._complaint.recovered():
            log.info("loop.recovered", loop=self.name, failures=failures)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


async def _attempt(callback: Callable[[], Awaitable[None]]) -> None:
    """At the end: Postgres may be away, and leases run out without us."""
    try:
        async with asyncio.timeout(STOP_SECONDS_MAX):
            await callback()
    except Exception as error:
        if not is_transient(error):
            raise
        log.warning("stop.skipped", callback=_name_of(callback), error=str(error))


def _name_of(function: Callable[..., object]) -> str:
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__qualname__", type(inner).__name__))


@asynccontextmanager
async def serving(
    service: Service[C], start: Callable[[Service[C]], Awaitable[None]]
) -> AsyncIterator[Service[C]]:
    """The part of the life between start and stop; raises at the end what killed a task."""
    try:
        await asyncio.create_task(_start(service, start), name=f"{service.name}.start")
        yield service
        if service._died.done():
            await service.wait_for_death()
    finally:
        await service._stop()


async def _start(service: Service[C], start: Callable[[Service[C]], Awaitable[None]]) -> None:
    # In a task of its own: every task that `start` makes inherits this binding, and no other does.
    structlog.contextvars.bind_contextvars(service=service.name)
    await start(service)


class Part(NamedTuple, Generic[C]):
    """One service of a process: `main.py` makes it, `run_service(*part)` runs it."""

    name: str
    config_kind: type[C]
    start: Callable[[Service[C]], Awaitable[None]]


def run_service(
    name: str, config_kind: type[C], start: Callable[[Service[C]], Awaitable[None]]
) -> None:
    """The whole life of a process with one service."""
    run_services([Part(name, config_kind, start)])


def run_services(parts: Sequence[Part[Any]]) -> None:
    """The whole life of a process: all parts share one event loop, and die together."""
    configs = [load_or_exit(part.config_kind) for part in parts]
    first = configs[0]
    set_up_logs(level=first.log_level, log_format=first.log_format)
    send_the_last = set_up_telemetry(
        instance=first.instance or default_instance(parts[0].name),
        otlp_endpoint=first.otlp_endpoint,
    )
    try:
        uvloop.run(_live(parts, configs))
    finally:
        send_the_last()


async def _live(parts: Sequence[Part[Any]], configs: Sequence[Config]) -> None:
    life = _Life([Service(part.name, config) for part, config in zip(parts, configs, strict=True)])
    life.catch_signals()
    async with AsyncExitStack() as stack:
        if configs[0].health_port:
            health = serve_health(configs[0].health_host, configs[0].health_port, life.is_ready)
            await stack.enter_async_context(health)
        try:
            await life.run(parts)
        except Exception as error:
            log.error("process.died", error=f"{type(error).__name__}: {error}")  # noqa: TRY400
            raise


class _Life:
    """The services of one process between the first start and the last stop."""

    def __init__(self, services: Sequence[Service[Any]]) -> None:
        self._services = services
        self._asked = asyncio.Event()
        self._ready = False

    def is_ready(self) -> bool:
        return self._ready and not self._asked.is_set()

    def catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked.set)

    async def run(self, parts: Sequence[Part[Any]]) -> None:
        async with AsyncExitStack() as stack:
            # Stopped before any of them is left: they drain at the same time.
            try:
                if await self._unless_ended(self._start_all(parts, stack)):
                    self._ready = True
                    log.info("process.ready", services=[part.name for part in parts])
                    await self._unless_ended(asyncio.Event().wait())
            finally:
                self._ready = False
                log.info("process.stopping")
                for service in self._services:
                    service.begin_stop()
        log.info("process.stopped")

    async def _start_all(self, parts: Sequence[Part[Any]], stack: AsyncExitStack) -> None:
        for part, service in zip(parts, self._services, strict=True):
            await stack.enter_async_context(serving(service, part.start))

    async def _unless_ended(self, work: Coroutine[Any, Any, object]) -> bool:
        """Do `work`, but no longer than until a signal comes (False) or a task dies (raises)."""
        doing = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._asked.wait())
        deaths = [asyncio.ensure_future(service.wait_for_death()) for service in self._services]
        tasks = [doing, asked, *deaths]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in (*deaths, doing):
                if task.done():
                    await task
            return doing.done()
        finally:
            await cancel(tasks)
