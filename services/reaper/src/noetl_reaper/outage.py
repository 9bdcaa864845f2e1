"""After an outage of Postgres the workers have the first word.

Nobody can renew a lease while Postgres is away, so right after it all of them may have run out,
though every worker lives. Whoever lives tries again at least once a second
(process/resilience.py); the reaper gives them time for that.
"""

import math
import time
from collections.abc import Awaitable, Callable


class Outage:
    def __init__(
        self, *, grace_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._grace_seconds = grace_seconds
        self._clock = clock
        self._noticed_at = -math.inf

    async def unless_recent(
        self, turn: Callable[[], Awaitable[int]], *, probe: Callable[[], Awaitable[object]]
    ) -> int:
        """Run the turn, if there was no outage lately; else only ask whether it goes on."""
        try:
            if not self.is_recent:
                return await turn()
            await probe()
        except BaseException:
            self.noticed()
            raise
        return 0

    def noticed(self) -> None:
        """Postgres did not answer just now, or nobody here has asked it."""
        self._noticed_at = self._clock()

    @property
    def is_recent(self) -> bool:
        return self._clock() - self._noticed_at < self._grace_seconds
