"""Whether a lease that ran out says anything of its worker: not after nobody could renew one.

While the database is away, or stands still, leases run out and their workers work on. When it is
back the reaper sees all of them at once, before the workers had a chance to renew. So after a look
that came late, because it failed, or hung, or because we ourselves were suspended, it waits until
every worker that lives has had time for a heartbeat.

The same goes for a clock of the database that was put forward: by it, too, the look came late.
"""

import math
from collections.abc import Callable

from noetl_core.process.clock import lease_clock

WAITS_MAX = 6
"""One after another: where every look is late, leases must still be ended some time."""


class Patience:
    """Begins with the process: what had to wait for the database at its start came late, too."""

    def __init__(
        self,
        *,
        wait_seconds: float,
        late_seconds: float,
        clock: Callable[[], float] = lease_clock,
    ) -> None:
        self._wait_seconds = wait_seconds
        self._late_seconds = late_seconds
        self._clock = clock
        self._looked_at = clock()
        self._database_looked_at = math.inf
        self._wait_until: float | None = None
        self._waits = 0

    def looked(self, database_now: float) -> bool:
        """A look at the database has succeeded. True when what it saw may be believed.

        `database_now` is its clock, read no earlier than what was seen by it.
        """
        now = self._clock()
        since = max(now - self._looked_at, database_now - self._database_looked_at)
        is_late = since > self._late_seconds
        self._looked_at, self._database_looked_at = now, database_now
        if is_late and self._waits < WAITS_MAX:
            self._waits += 1
            self._wait_until = now + self._wait_seconds
        if self._wait_until is not None and now < self._wait_until:
            return False
        self._wait_until = None
        if not is_late:
            self._waits = 0
        return True
