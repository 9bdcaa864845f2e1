"""Takes work from the queue of record: as much as there are free slots, in one statement.

    wake-up ──> lease ──> all slots taken: forward the rest of the wake-up, lease when one is free
                     └──> queue empty: look again at the next `available_at`, or in a second

A wake-up says how many commands there are. It is heard by one worker of the pool; if that one
cannot take them all, it passes the rest on, so that idle workers wake one after the other. A lost
wake-up costs at most the poll.
"""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Collection, Sequence
from functools import partial

import structlog

from noetl_core.bus.connection import Bus
from noetl_core.domain.ids import ShardId, WorkerId
from noetl_core.store import command
from noetl_core.store.postgres import Pool
from noetl_core.wire.subjects import any_pool_wake, any_worker_wake, pool_wake
from noetl_worker.metrics import TALLY
from noetl_worker.tool_slots import ToolSlots
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
        pools: Sequence[str],
        offers: Collection[str],
        tool_slots: ToolSlots,
        lease_seconds: float,
        poll_seconds: float,
        poll_away_seconds: float,
        work: Work,
    ) -> None:
        self._pool = pool
        self._bus = bus
        self._worker_id = worker_id
        self._pools = deque(pools)
        self._offers = frozenset(offers)
        self._tool_slots = tool_slots
        self._lease_seconds = lease_seconds
        self._poll_seconds = poll_seconds
        self._poll_away_seconds = poll_away_seconds
        self._work = work
        self._burst = BURST_MIN
        self.wake = asyncio.Event()
        self._announced: Counter[str] = Counter()
        self.settled_at = -math.inf
        """When the last lease was asked for of which we know what it gave."""
        self._is_hungry = False
        self._is_unsure = False
        self._timer: asyncio.Handle | None = None
        self._look_at = 0.0

    async def listen(self) -> None:
        for pool in self._pools:
            heard = partial(self.heard, pool)
            await self._bus.subscribe(any_pool_wake(pool), heard, queue=f"workers-{pool}")
        await self._bus.subscribe(any_worker_wake(self._worker_id), self.heard_by_name)

    async def heard(self, pool: str, body: bytes) -> None:
        """There is work. The body says how much, in digits."""
        count = int(body) if body.isdigit() else 1
        if self._work.free_slots() > 0:
            self._announced[pool] += count
            self.wake.set()
        else:
            # Half of it: among busy workers a wake-up dies out after a few hops, and the first
            # that has a slot again finds the rows anyway.
            await self._pass_on(pool, count // 2)

    async def heard_by_name(self, _body: bytes) -> None:
        """There is work for us above all: it waits for a slot here, nobody else is told."""
        self._is_hungry = True
        self.wake.set()

    def slot_freed(self) -> None:
        if self._is_hungry:
            self.wake.set()

    async def turn(self) -> bool:
        """Fill the free slots once."""
        if self._is_unsure:
            await self._take_up()
        free = self._work.free_slots()
        if free <= 0:
            self._is_hungry = True
            return False
        full = self._tool_slots.full()
        limit = min(free, self._next_burst(), self._tool_slots.most_at_once() or free)
        announced, self._announced = self._announced, Counter()
        asked_at = time.monotonic()
        leased = await self._lease(limit, self._offers - full if full else self._offers)
        # The next look begins with another pool: none of ours starves behind a busy one.
        self._pools.rotate(-1)
        for each in leased:
            self._work.begin(each)
            announced[each.pool] -= 1
        self.settled_at = asked_at
        TALLY.leased += len(leased)
        is_filled = len(leased) == limit
        # What the tool of a command has no slot for may be all that is there.
        self._is_hungry = is_filled or bool(full)
        if not is_filled:
            await self._plan_next_look(found=bool(leased))
        elif limit == free:
            for pool, count in announced.items():
                await self._pass_on(pool, count)
        else:
            self._announced += announced
        return is_filled and limit < free

    async def _lease(self, limit: int, offers: Collection[str]) -> list[command.Leased]:
        try:
            return await command.lease(
                self._pool,
                self._worker_id,
                list(self._pools),
                limit=limit,
                lease_seconds=self._lease_seconds,
                offers=list(offers),
            )
        except BaseException:
            self._is_unsure = True
            raise

    async def _take_up(self) -> None:
        """The lease whose answer was lost may have happened: then its rows are ours, and nobody
        runs them until their time is over."""
        for each in await command.held_by(self._pool, self._worker_id):
            self._work.begin(each)
        self._is_unsure = False

    def _next_burst(self) -> int:
        """Much at once where everything is over at once; else a little, and then a second look.

        What we lease and cannot run yet, because it waits for a child process, is lost to workers
        that could. So we look how the first ones fare before we take more.
        """
        self._burst = self._burst * 2 if self._work.is_idle else BURST_MIN
        self._burst = min(self._burst, BURST_MAX)
        return self._burst

    async def _pass_on(self, pool: str, count: int) -> None:
        if count > 0:
            await self._bus.wake(pool_wake(_ANY_SHARD, pool), b"%d" % count)

    async def _plan_next_look(self, *, found: bool) -> None:
        if found or not self._bus.is_answering:
            self._look_in(self._poll_away_seconds)
            return
        ready_in = await command.next_available(
            self._pool, list(self._pools), within_seconds=self._poll_seconds
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
