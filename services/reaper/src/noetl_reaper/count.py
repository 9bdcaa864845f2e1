"""Counts the queue for whoever scales workers by its length."""

import time
from collections.abc import Callable

from noetl_core.store import command
from noetl_core.store.postgres import Pool
from noetl_reaper.metrics import show_nothing, show_queue

SHARE_MAX = 0.02
"""Of the time is spent on it: a long queue takes long to count, and is counted less often."""

WAIT_SECONDS_MAX = 60.0
"""But not less often than this: it may have taken long because the database stood still."""


class QueueCount:
    def __init__(self, pool: Pool, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        self._count_at = 0.0

    async def turn(self, *, leads: bool) -> bool:
        """Says whether it was counted."""
        begun = self._clock()
        if not leads:
            show_nothing()
            self._count_at = 0.0
            return False
        if begun < self._count_at:
            return False
        show_queue(await command.depth(self._pool))
        taken = self._clock() - begun
        self._count_at = begun + taken + min(taken / SHARE_MAX, WAIT_SECONDS_MAX)
        return True
