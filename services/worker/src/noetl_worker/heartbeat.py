"""Renews our leases and confirms our results, from a thread of its own.

A worker whose loop is busy, or whose tool blocks it, must not lose its leases: so the heartbeat has
its own thread, its own loop and its own connection. One statement per interval covers everything
that runs and everything that is finished and not confirmed.

It also gives back what is ours without our knowing: a lease whose answer was lost would be held by
nobody until it runs out. What it may give back was leased before a look of ours that was over when
the last lease began of which we know what it gave. Leases are asked for one after the other, so
nothing of that can be on its way to us any more:

    lease ──✗ lost      look (its time, by the database)      lease ──> known      give back
"""

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import NamedTuple

import structlog
import uvloop

from noetl_core.domain.ids import WorkerId
from noetl_core.process.complaint import Complaint
from noetl_core.process.resilience import backoff_seconds
from noetl_core.store import command
from noetl_core.store.command import CommandKey
from noetl_core.store.postgres import Pool, is_postgres_away, open_pool
from noetl_worker.held import Held

JOIN_SECONDS_MAX = 5.0
EARLY_SECONDS_MIN = 0.25
"""A heartbeat that is asked for comes no sooner: the brokers need a moment to record results."""

log = structlog.get_logger()


class Look(NamedTuple):
    """A look at the queue: when by the clock of the database, and when it was over by ours."""

    at: datetime
    over_at: float


Judge = Callable[[list[CommandKey], set[CommandKey], float], None]


class Heartbeat:
    """`held` is read on the heartbeat's thread; `judge` is called on the worker's loop."""

    def __init__(
        self,
        dsn: str,
        worker_id: WorkerId,
        *,
        held: Held,
        judge: Judge,
        heartbeat_seconds: float,
        lease_seconds: float,
    ) -> None:
        self.settled_at: Callable[[], float] = _never
        """When the last lease was asked for of which we know what it gave, by our clock."""
        self._look: Look | None = None
        self._dsn = dsn
        self._worker_id = worker_id
        self._held = held
        self._judge = judge
        self._heartbeat_seconds = heartbeat_seconds
        self._lease_seconds = lease_seconds
        self._worker_loop = asyncio.get_running_loop()
        self._died: asyncio.Future[None] = self._worker_loop.create_future()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._own_loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._is_stopping = False
        self._is_asked = False
        self._complaint = Complaint()

    def start(self) -> None:
        self._thread.start()

    def beat_now(self) -> None:
        """Ask for a heartbeat before its time; many requests at once are one."""
        if not self._is_asked:
            self._is_asked = True
            self._worker_loop.call_later(EARLY_SECONDS_MIN, self._poke)

    async def wait_for_death(self) -> None:
        """Raises what ended the thread; lasts forever as long as all is well."""
        await asyncio.shield(self._died)

    async def stop(self) -> None:
        self._is_stopping = True
        self._poke()
        await asyncio.to_thread(self._thread.join, JOIN_SECONDS_MAX)

    def _poke(self) -> None:
        if self._own_loop is not None and not self._own_loop.is_closed():
            self._own_loop.call_soon_threadsafe(self._wake.set)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._beat_on())

    async def _beat_on(self) -> None:
        self._own_loop = asyncio.get_running_loop()
        while not self._is_stopping:
            try:
                await self._beat_while_connected()
            except Exception as error:  # noqa: BLE001 - it ends the process, on its own loop
                if not is_postgres_away(error):
                    # Without heartbeats this worker is of no use: it must die, and visibly.
                    self._worker_loop.call_soon_threadsafe(self._died.set_exception, error)
                    return
                # What runs goes on: the leases last a while, and nobody takes it from us before.
                if self._complaint.failed():
                    failures = self._complaint.failures
                    log.warning("heartbeat.delayed", failures=failures, error=repr(error))
                await self._wait(backoff_seconds(self._complaint.failures))

    async def _beat_while_connected(self) -> None:
        async with open_pool(
            self._dsn,
            role="noetl_worker",
            size_max=1,
            command_seconds=self._patience_seconds,
            settings=command.QUEUE_SETTINGS | {"synchronous_commit": "off"},
        ) as pool:
            while not self._is_stopping:
                await self._beat(pool)
                if failures := self._complaint.recovered():
                    log.info("heartbeat.recovered", failures=failures)
                await self._wait(self._heartbeat_seconds)

    @property
    def _patience_seconds(self) -> float:
        """How long a heartbeat may be without an answer. One that is never answered costs twice
        that, after an interval; then there must be time for another, on a new connection."""
        return (self._lease_seconds - self._heartbeat_seconds) / 4

    async def _beat(self, pool: Pool) -> None:
        self._is_asked = False
        asked_at = time.monotonic()
        keys = self._held.keys()
        if keys:
            still_there = await command.heartbeat(
                pool, self._worker_id, keys, lease_seconds=self._lease_seconds
            )
            self._worker_loop.call_soon_threadsafe(self._judge, keys, still_there, asked_at)
        await self._give_back_strays(pool)

    async def _give_back_strays(self, pool: Pool) -> None:
        # In this order: what the settled leases gave is among the keys.
        settled_at, known = self.settled_at(), self._held.known_keys()
        look = self._look
        is_settled = look is not None and look.over_at <= settled_at
        found = await command.give_back_strays(
            pool,
            self._worker_id,
            known,
            leased_before=look.at if look is not None and is_settled else None,
            lease_seconds=self._lease_seconds,
        )
        if found.given_back:
            log.warning("strays.given_back", count=found.given_back)
        if look is None or is_settled:
            self._look = Look(found.looked_at, time.monotonic())

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()


def _never() -> float:
    return -math.inf


@asynccontextmanager
async def beating(
    dsn: str,
    worker_id: WorkerId,
    *,
    held: Held,
    judge: Judge,
    heartbeat_seconds: float,
    lease_seconds: float,
) -> AsyncIterator[Heartbeat]:
    heartbeat = Heartbeat(
        dsn,
        worker_id,
        held=held,
        judge=judge,
        heartbeat_seconds=heartbeat_seconds,
        lease_seconds=lease_seconds,
    )
    heartbeat.start()
    try:
        yield heartbeat
    finally:
        await heartbeat.stop()
