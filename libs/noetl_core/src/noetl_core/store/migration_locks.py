"""The locks of a migration: asked for briefly and again, so that nobody queues behind us for long.

Whoever asks for a table after us waits until we have had it. An ALTER TABLE that waits for one long
transaction therefore stops everything else on that table. So a transaction of ours waits for its
locks `lock_seconds` in all, is rolled back, lets the others pass, and comes again.

That is less than the second after which Postgres looks for a deadlock: in one of us with a service
it is always we who let go. Who may say so has the look come sooner, because it also ends an
autovacuum that is in the way, which would otherwise outlast us for hours.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

import asyncpg

from noetl_core.domain.errors import NoetlError
from noetl_core.store.postgres import Connection

LOCK_SECONDS_MIN = 0.05
"""What a statement waits for its own lock when those before it have used up the time."""

RETRY_SECONDS_MIN = 0.5
RETRY_SECONDS_MAX = 5.0

T = TypeVar("T")

Tell = Callable[[str], None]


class Patience(NamedTuple):
    lock_seconds: float = 0.5
    """How long everybody else may have to wait behind us."""
    seconds: float = 600.0
    """How long we come again before we give up."""


class MigrationBlockedError(NoetlError):
    """Somebody else kept a lock, or the right to migrate, for longer than we were to wait."""


_LOOK_FOR_DEADLOCKS_SOON = """
SELECT set_config('deadlock_timeout', '100ms', true)
WHERE has_parameter_privilege('deadlock_timeout', 'SET')
"""


class Locks:
    """What the transactions of one migration run in."""

    def __init__(self, conn: Connection, patience: Patience, tell: Tell) -> None:
        self._conn = conn
        self._patience = patience
        self._tell = tell
        self._used_up_at = 0.0

    async def briefly(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do `work` in a transaction, from the beginning each time a lock was not to be had."""

        async def once() -> T:
            self._used_up_at = time.monotonic() + self._patience.lock_seconds
            async with self._conn.transaction():
                await self._conn.execute(_LOOK_FOR_DEADLOCKS_SOON)
                return await work()

        return await self.patiently(once)

    async def execute(self, statement: str) -> None:
        """Each statement of `work`: it waits for its locks no longer than is left."""
        left = max(LOCK_SECONDS_MIN, self._used_up_at - time.monotonic())
        hurry = f"SET LOCAL lock_timeout = {left * 1000:.0f};"
        await self._conn.execute(f"{hurry}\n{statement}", timeout=None)

    async def patiently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        begun, refusals = time.monotonic(), 0
        while True:
            try:
                return await attempt()
            except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError) as error:
                refusals += 1
                who = await in_the_way(self._conn, seconds=self._patience.lock_seconds)
                if time.monotonic() - begun > self._patience.seconds:
                    raise MigrationBlockedError(
                        f"no lock was to be had in {self._patience.seconds:g} s: {who}."
                        " End that session or wait for its end, then run it again."
                    ) from error
            pause = min(RETRY_SECONDS_MAX, RETRY_SECONDS_MIN * 2.0 ** min(refusals - 1, 10))
            self._tell(f"gets no lock: {who}. Tries again in {pause:g} s")
            await asyncio.sleep(pause)


# Without the right to see the sessions of others there is nothing to tell.
_IN_THE_WAY = """
SELECT a.pid, a.backend_type, a.application_name, a.state,
       extract(epoch FROM now() - a.xact_start)::double precision AS seconds
FROM pg_stat_activity AS a
WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
  AND a.xact_start < now() - make_interval(secs => $1)
  AND EXISTS (
      SELECT FROM pg_locks AS l
      JOIN pg_class AS c ON c.oid = l.relation
      WHERE l.pid = a.pid AND l.granted AND c.relnamespace = 'noetl'::regnamespace
  )
ORDER BY a.xact_start
LIMIT 1
"""


async def in_the_way(conn: Connection, *, seconds: float) -> str:
    """Who has held tables of ours for longest, for a person to read."""
    row = await conn.fetchrow(_IN_THE_WAY, seconds)
    if row is None:
        return "the tables are in use"
    is_client = row["backend_type"] == "client backend"
    program = row["application_name"] or "a program without a name"
    doing = f"{program}, {row['state']}," if is_client else f"{row['backend_type']},"
    return f"process {row['pid']} ({doing} in one transaction for {row['seconds']:.0f} s) holds it"
