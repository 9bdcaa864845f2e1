"""One process at a time plays a role: it holds noetl.leader by a lease and renews it."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import structlog

from noetl_core.process.clock import lease_clock
from noetl_core.process.membership import Member
from noetl_core.process.service import Service
from noetl_core.store import leader
from noetl_core.store.postgres import Pool

LEASE_SECONDS = 15.0
_RENEWALS_PER_LEASE = 3

log = structlog.get_logger()


class Leadership:
    """Whether we play the role, by our own clock: never longer than the lease in Postgres."""

    def __init__(
        self,
        pool: Pool,
        member: Member,
        role: str,
        *,
        lease_seconds: float = LEASE_SECONDS,
        clock: Callable[[], float] = lease_clock,
    ) -> None:
        self.role = role
        self.epoch = 0
        self._pool = pool
        self._member = member
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._leased_until = 0.0
        self._led = False
        self._is_new = True

    @property
    def is_leader(self) -> bool:
        return self._clock() < self._leased_until

    @property
    def has_led(self) -> bool:
        """Whether the role was ours when Postgres last answered, also while the lease has lapsed:
        nobody is known to have taken it."""
        return self._led

    async def keep(self) -> None:
        """One turn: renew the lease, or take it if it is free."""
        asked_at = self._clock()
        if self._is_new:
            # A process that was killed and started again need not wait for its own old lease.
            await leader.inherit(
                self._pool, self.role, kind=self._member.kind, name=self._member.name
            )
            self._is_new = False
        epoch = await leader.acquire(
            self._pool, self.role, self._member.runtime_id, lease_seconds=self._lease_seconds
        )
        self.epoch = self.epoch if epoch is None else epoch
        self._leased_until = 0.0 if epoch is None else asked_at + self._lease_seconds
        self._tell_changes(leads=epoch is not None)

    async def resign(self) -> None:
        self._leased_until = 0.0
        await leader.release(self._pool, self.role, self._member.runtime_id)
        self._tell_changes(leads=False)

    def _tell_changes(self, *, leads: bool) -> None:
        if leads != self._led:
            self._led = leads
            log.info("leader.changed", role=self.role, leads=leads, epoch=self.epoch)


@asynccontextmanager
async def leadership(
    service: Service[Any],
    pool: Pool,
    member: Member,
    role: str,
    lease_seconds: float = LEASE_SECONDS,
) -> AsyncIterator[Leadership]:
    """Stand for the role as long as the service lasts; ask `is_leader` before every turn."""
    held = Leadership(pool, member, role, lease_seconds=lease_seconds)
    await held.keep()
    service.every(lease_seconds / _RENEWALS_PER_LEASE, held.keep, name=f"{role}.leadership")
    service.on_stop(held.resign)
    yield held
