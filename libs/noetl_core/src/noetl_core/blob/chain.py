"""Tiers for payloads that are too large to ride with a message, the preferred one first.

When one is away the next takes what comes, and the first is left alone for a while: to find out
that nobody answers takes long. Rows say which tier has what, so nothing has to move back.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog

from noetl_core.blob.away import StoreAwayError
from noetl_core.blob.metrics import FALLBACKS
from noetl_core.blob.tier import Tier
from noetl_core.domain.ids import ExecutionId

LEFT_ALONE_SECONDS = 10.0

log = structlog.get_logger()


class Kept(NamedTuple):
    tier: str
    uri: str


class Chain:
    def __init__(
        self, tiers: Sequence[Tier], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tiers = tiers
        self._clock = clock
        self._away_until: dict[str, float] = {}
        self.why = ""
        """What was said last by one that is away."""

    async def put(self, execution_id: ExecutionId, name: str, body: bytes) -> Kept | None:
        """Where it is now; None when nobody takes it."""
        for tier in self._tiers:
            if self._away_until.get(tier.name, 0.0) > self._clock():
                continue
            try:
                return Kept(tier.name, await tier.put(execution_id, name, body))
            except StoreAwayError as error:
                self._pass_over(tier, error)
        return None

    def _pass_over(self, tier: Tier, error: StoreAwayError) -> None:
        self.why = str(error)
        self._away_until[tier.name] = self._clock() + LEFT_ALONE_SECONDS
        FALLBACKS.add(1, {"tier": tier.name})
        log.warning("store.away", tier=tier.name, error=str(error))
