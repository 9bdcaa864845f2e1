"""Takes work from the queue of record: as much as there are free slots, in one statement.

    wake-up ──> lease ──> all slots taken: forward the rest of the wake-up, lease when one is free
                     └──> queue empty: look again at the next `available_at`, or in a second

A wake-up says how many commands there are. It is heard by one worker of the pool; if that one
cannot take them all, it passes the rest on, so that idle workers wake one after the other. A lost
wake-up costs at most the poll.
"""

import asyncio

import structlog

from noetl_core.bus.connection import Bus
from noetl_core.domain.ids import ShardId, WorkerId
from noetl_core.store import command
from noetl_core.store.postgres import Pool
from noetl_core.wire.subjects import any_pool_wake, pool_wake, worker_wake
from noetl_worker.metrics import TALLY
from noetl_worker.work import Work

BURST_MIN = 8
BURST_MAX = 256

_ANY_SHARD = ShardId(0)

log = structlog.get_logger()


class Leaser:
    def __init__(
        self,
        pool: Pool,
        bus: Bus,
        *,
        worker_id: WorkerId,
        pool_name: str,
        lease_seconds: float,
        poll_seconds: float,
        poll_away_seconds: float,
        work: Work,
    ) -> None:
        self._pool = pool
        self._bus = bus
        self._worker_id = worker_id
        self._pool_name = pool_name
        self._lease_seconds = lease_seconds
        self._poll_seconds = poll_seconds
        self._poll_away_seconds = poll_away_seconds
        self._work = work
        self._burst = BURST_MIN
        self.wake = asyncio.Event()
        self._announced = 0
        self._is_hungry = False
        self._timer: asyncio.Handle | None = None
        self._look_at = 0.0

    async def listen(self) -> None:
        group = f"workers-{self._pool_name}"
        await self._bus.subscribe(any_pool_wake(self._pool_name), self.heard, queue=group)
        await self._bus.subscribe(worker_wake(self._worker_id), self.heard)

    async def heard(self, body: bytes) -> None:
        """There is work. The body says how much, in digits."""
        count = int(body) if body.isdigit() else 1
        if self._work.free_slots() > 0:
            self._announced += count
            self.wake.set()
        else:
            # Half of it: among busy workers a wake-up dies out after a few hops, and the first
            # that has a slot again finds the rows anyway.
            await self._pass_on(count // 2)

    def slot_freed(self) -> None:
        if self._is_hungry:
            self.wake.set()

    async def turn(self) -> bool:
        """Fill the free slots once."""
        free = self._work.free_slots()
        if free <= 0:
            self._is_hungry = True
            return False
        limit = min(free, self._next_burst())
        announced, self._announced = self._announced, 0
        leased = await command.lease(
            self._pool,
            self._worker_id,
            [self._pool_name],
            limit=limit,
            lease_seconds=self._lease_seconds,
        )
        self._is_hungry = len(leased) == limit
        for each in leased:
            self._work.begin(each)
        TALLY.leased += len(leased)
        if not self._is_hungry:
            await self._plan_next_look(found=bool(leased))
        elif limit == free:
            await self._pass_on(announced - len(leased))
        else:
            self._announced += max(0, announced - len(leased))
        return self._is_hungry and limit < free

    def _next_burst(self) -> int:
        """Much at once where everything is over at once; else a little, and then a second look.

        What we lease and cannot run yet, because it waits for a child process, is lost to workers
        that could. So we look how the first ones fare before we take more.
        """
        self._burst = self._burst * 2 if self._work.is_idle else BURST_MIN
        self._burst = min(self._burst, BURST_MAX)
        return self._burst

    async def _pass_on(self, count: int) -> None:
        if count > 0:
            await self._bus.wake(pool_wake(_ANY_SHARD, self._pool_name), b"%d" % count)

    async def _plan_next_look(self, *, found: bool) -> None:
        if found or not self._bus.is_connected:
            self._look_in(self._poll_away_seconds)
            return
        ready_in = await command.next_available(
            self._pool, [self._pool_name], within_seconds=self._poll_seconds
        )
        if ready_in is not None:
            self._look_in(ready_in)

    def _look_in(self, seconds: float) -> None:
        """Wake up then, unless something wakes us sooner anyway."""
        loop = asyncio.get_running_loop()
        due = loop.time() + max(0.0, seconds)
        if self._timer is not None and self._look_at > loop.time():
            if self._look_at <= due:
                return
            self._timer.cancel()
        # Kept here: the handle of a call without a delay does not know its time.
        self._look_at = due
        self._timer = loop.call_at(due, self.wake.set)
