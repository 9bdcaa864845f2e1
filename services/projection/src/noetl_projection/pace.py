"""How close together two turns may be.

Every commit of the broker wakes us. Under load a turn for each of them would write the same rows
again and again, an event at a time; a short pause lets events gather, and one row is written for
several of them. After a quiet moment there is no pause, so a single event is seen at once.
"""

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress

HURRY_SECONDS = 0.3
"""For so long after a barrier was sent its close may come with the next commit of a broker. What is
recorded of it is as old as we are slow."""


class Pace:
    def __init__(self, window_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_seconds = window_seconds
        self._clock = clock
        self._began_at = -window_seconds
        self._hurried_until = -math.inf

    def hurry(self) -> None:
        """Somebody is about to wait for us."""
        self._hurried_until = self._clock() + HURRY_SECONDS

    @property
    def is_hurried(self) -> bool:
        return self._clock() < self._hurried_until

    async def pause(self, *, unless: asyncio.Event) -> None:
        """Wait as long as the window asks for, or until somebody is in a hurry."""
        seconds = self._began_at + self._window_seconds - self._clock()
        if seconds > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await unless.wait()
        self._began_at = self._clock()
