"""Keeps a fair share of the shards: renews, claims orphans, gives up surplus.

    total = 16, live members of our kind = 3  ->  nobody holds more than ceil(16 / 3) = 6

After the count went down, the shards that work and those that are leaving are shared like this
each by themselves.

Every owner does this for itself, so shards move on when a process dies even while the shard-manager
is down. While it is up, it says who shall have a shard next: the owner lets go of it and calls, and
that one claims it.

What a process holds it may use until its own clock says that the lease is over; that a sleeper
cannot write after that is proved by the epoch, in the commit itself.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated

import structlog
from msgspec import Meta

from noetl_core.domain.assignment import fair_share_max
from noetl_core.domain.ids import ShardId
from noetl_core.process.clock import lease_clock
from noetl_core.process.config import Config, also
from noetl_core.process.membership import Member
from noetl_core.process.metrics import show_shards
from noetl_core.store import execution_shard, runtime
from noetl_core.store.execution_shard import Claim, ShardRow
from noetl_core.store.postgres import Pool

LOOK_SECONDS_MAX = 0.5
SURPLUS_SECONDS = 5.0
"""How long the shard-manager is given to say who gets what we hold too many of."""

OUTAGE_SECONDS_MAX = 3.0
"""How long the others are given to renew after Postgres was away, before their shards are claimed:
they try at least once a second."""

_NOTHING: Mapping[ShardId, int] = MappingProxyType({})

log = structlog.get_logger()


class ShardConfig(Config, frozen=True, kw_only=True):
    """What every service that owns shards reads."""

    shard_lease_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="The shards of an owner that fell silent have another one within this.",
            extra=also("NOETL_SHARD_LEASE_SEC"),
        ),
    ] = 30.0
    shard_heartbeat_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="How often the lease of our shards is renewed, at least.",
            extra=also("NOETL_SHARD_HEARTBEAT_SEC"),
        ),
    ] = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard_heartbeat_seconds >= self.shard_lease_seconds:
            raise ValueError(
                f"NOETL_SHARD_HEARTBEAT_SECONDS={self.shard_heartbeat_seconds:g} must be below "
                f"NOETL_SHARD_LEASE_SECONDS={self.shard_lease_seconds:g}"
            )

    @property
    def shard_look_seconds(self) -> float:
        """How often to run `ShardOwner.keep`: orphans are found within this time."""
        return min(self.shard_heartbeat_seconds, self.shard_lease_seconds / 8, LOOK_SECONDS_MAX)

    @property
    def shard_held_seconds(self) -> float:
        """How long a shard stays ours without a renewal: shorter than what was promised by the time
        in which others notice, with one look to spare."""
        return self.shard_lease_seconds - 2 * self.shard_look_seconds

    @property
    def shard_renew_seconds(self) -> float:
        """Two renewals may fail before the lease is over."""
        return min(self.shard_heartbeat_seconds, self.shard_held_seconds / 3)


async def _ignore_gain(_claims: Sequence[Claim]) -> None: ...
async def _ignore_loss(_shard_id: ShardId) -> None: ...
async def _ignore_release() -> None: ...


class ShardOwner:
    """The shards of one role that this process holds."""

    def __init__(
        self,
        pool: Pool,
        member: Member,
        *,
        role: str,
        lease_seconds: float = 30.0,
        heartbeat_seconds: float = 10.0,
        on_gain: Callable[[Sequence[Claim]], Awaitable[None]] = _ignore_gain,
        on_loss: Callable[[ShardId], Awaitable[None]] = _ignore_loss,
        on_release: Callable[[], Awaitable[None]] = _ignore_release,
        clock: Callable[[], float] = lease_clock,
    ) -> None:
        self.role = role
        self._pool = pool
        self._member = member
        self._lease_seconds = lease_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._on_gain = on_gain
        self._on_loss = on_loss
        self._on_release = on_release
        self._clock = clock
        self._claims: dict[ShardId, int] = {}
        self._renewed_at = -math.inf
        self._is_renewal_due = True
        self._is_new = True
        self._surplus_since: float | None = None
        self._patient_until = -math.inf
        self._turn = asyncio.Lock()
        show_shards(role, member.name, self.held)

    def held(self) -> Mapping[ShardId, int]:
        """Shard -> epoch. Empty when the lease has run out by our clock, until it is renewed."""
        return _NOTHING if self._is_lapsed() else MappingProxyType(self._claims)

    def claimed(self) -> Collection[ShardId]:
        """Those that nobody is known to have taken from us, also while our lease has run out."""
        return self._claims.keys()

    async def keep(self) -> None:
        """One turn, to be run every `shard_look_seconds`."""
        async with self._turn:
            await self._keep()

    async def _keep(self) -> None:
        asked_at = self._clock()
        self._notice_outage(asked_at)
        if self._is_new:
            await self._inherit()
        if self._is_renewal_due or asked_at - self._renewed_at >= self._heartbeat_seconds:
            await self._renew(asked_at)
        rows = await execution_shard.look(self._pool, self.role)
        await self._follow(rows)
        await self._hand_over(rows)
        if asked_at < self._patient_until:
            return
        members = await self._living(rows)
        surplus = [
            shard_id
            for kind in execution_shard.parted(rows)
            for shard_id in await self._take_share(kind, members)
        ]
        await self._give_up_surplus(surplus)

    def _notice_outage(self, asked_at: float) -> None:
        """Have we been kept from renewing for so long that the others' leases may be over, too?"""
        margin = self._lease_seconds - self._heartbeat_seconds
        if -math.inf < self._renewed_at <= asked_at - margin:
            self._patient_until = asked_at + min(OUTAGE_SECONDS_MAX, 2 * self._heartbeat_seconds)

    async def _follow(self, rows: Iterable[ShardRow]) -> None:
        """Somebody may have taken shards from us, or all from everybody, since we last renewed."""
        ours = [
            Claim(row.shard_id, row.epoch)
            for row in rows
            if row.owner == self._member.runtime_id and row.is_leased
        ]
        await self._lose_all_but(ours)
        await self._gain([claim for claim in ours if claim.shard_id not in self._claims])

    async def _hand_over(self, rows: Iterable[ShardRow]) -> None:
        wanted = [
            row.shard_id
            for row in rows
            if row.shard_id in self._claims
            and row.wanted is not None
            and row.wanted != self._member.runtime_id
        ]
        if wanted:
            await self.give_up(wanted)

    async def _take_share(self, rows: Sequence[ShardRow], members: int) -> list[ShardId]:
        """Claim what is free, up to a fair share of these. Returns what we hold beyond it."""
        limit = fair_share_max(shards=len(rows), members=members)
        own = [row.shard_id for row in rows if row.shard_id in self._claims]
        if len(own) < limit and any(not row.is_leased for row in rows):
            await self._claim([row.shard_id for row in rows], limit - len(own))
        return own[limit:]

    async def _give_up_surplus(self, surplus: list[ShardId]) -> None:
        """The shard-manager knows better who shall have it; without one, whoever is fast."""
        if not surplus:
            self._surplus_since = None
            return
        since = self._surplus_since = self._surplus_since or self._clock()
        if self._clock() - since >= SURPLUS_SECONDS:
            await self.give_up(surplus)

    async def give_up(self, shard_ids: list[ShardId]) -> None:
        """Stop using these shards first, then let the others have them."""
        await self._let_go(shard_ids)
        await execution_shard.release(self._pool, self.role, self._member.runtime_id, shard_ids)
        await self._on_release()

    async def release(self) -> None:
        """Give up everything: for `service.on_stop`."""
        async with self._turn:
            # Who still counts us among the living would leave our share to us.
            await runtime.mark_offline(self._pool, [self._member.runtime_id])
            await self._let_go(list(self._claims))
            # Also what is ours in Postgres and not in use: claimed while its gain failed, or lost
            # by a refused commit and kept by our lease.
            await execution_shard.release(self._pool, self.role, self._member.runtime_id)
            await self._on_release()

    async def lost(self, shard_ids: Iterable[ShardId]) -> None:
        """A commit was refused (ShardLostError): not ours any more, whatever the lease says."""
        self._is_renewal_due = True
        await self._let_go(shard_ids)

    def _is_lapsed(self) -> bool:
        return self._clock() - self._renewed_at >= self._lease_seconds

    async def _inherit(self) -> None:
        # A process that was restarted under its name need not wait for its own old lease.
        await execution_shard.inherit(
            self._pool, self.role, self._member.runtime_id, instance=self._member.name
        )
        self._is_new = False

    async def _renew(self, asked_at: float) -> None:
        claims = await execution_shard.renew(
            self._pool, self.role, self._member.runtime_id, lease_seconds=self._lease_seconds
        )
        await self._lose_all_but(claims)
        self._renewed_at = asked_at
        self._is_renewal_due = False
        await self._gain([claim for claim in claims if claim.shard_id not in self._claims])

    async def _claim(self, shard_ids: Sequence[ShardId], limit: int) -> None:
        claims = await execution_shard.claim(
            self._pool,
            self.role,
            self._member.runtime_id,
            instance=self._member.name,
            lease_seconds=self._lease_seconds,
            limit=limit,
            of=shard_ids,
        )
        await self._gain(claims)

    async def _living(self, rows: Sequence[ShardRow]) -> int:
        """How many share the shards, ourselves among them."""
        # Who let a lease run out is not counted, or its orphans would wait for a dead process;
        # should it be alive, its next heartbeat says so.
        lapsed = {row.owner for row in rows if row.owner is not None and not row.is_leased}
        lapsed.discard(self._member.runtime_id)
        if lapsed:
            await runtime.mark_offline(self._pool, sorted(lapsed))
        return await runtime.live_count(self._pool, self._member.kind)

    async def _gain(self, claims: Sequence[Claim]) -> None:
        if not claims:
            return
        # Only after the callback are the shards in use: whatever must be ready before their first
        # commit (ids above their newest event) is ready then.
        try:
            await self._on_gain(claims)
        except BaseException:
            # Ours in Postgres, but not in use: the next turn renews, and finds them once more.
            self._is_renewal_due = True
            raise
        self._claims.update({claim.shard_id: claim.epoch for claim in claims})
        for shard_id, epoch in claims:
            log.info("shard.gained", role=self.role, shard_id=shard_id, epoch=epoch)

    async def _lose_all_but(self, claims: Iterable[Claim]) -> None:
        kept = {claim.shard_id: claim.epoch for claim in claims}
        for shard_id, epoch in list(self._claims.items()):
            if kept.get(shard_id) != epoch:
                await self._lose(shard_id)

    async def _let_go(self, shard_ids: Iterable[ShardId]) -> None:
        for shard_id in shard_ids:
            await self._lose(shard_id)

    async def _lose(self, shard_id: ShardId) -> None:
        epoch = self._claims.pop(shard_id, None)
        log.info("shard.lost", role=self.role, shard_id=shard_id, epoch=epoch)
        await self._on_loss(shard_id)
