"""A warning that would come again and again comes once in a while, and says how often it was so."""

import time
from collections.abc import Callable

EVERY_SECONDS = 30.0


class Complaint:
    """What goes wrong repeatedly, such as a heartbeat while the database is away."""

    def __init__(
        self, *, every_seconds: float = EVERY_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._every_seconds = every_seconds
        self._clock = clock
        self._told_at: float | None = None
        self.failures = 0
        """In a row."""

    def failed(self) -> bool:
        """Count a failure. True when it is time to say so: at the first, then every so often."""
        self.failures += 1
        now = self._clock()
        if self._told_at is not None and now - self._told_at < self._every_seconds:
            return False
        self._told_at = now
        return True

    def recovered(self) -> int:
        """It works again. Says how many failures there were before."""
        failures, self.failures, self._told_at = self.failures, 0, None
        return failures
