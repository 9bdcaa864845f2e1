"""What has served its time goes: results with a `ttl`, and the keys of old requests.

A file is removed before its row says so. Dying between the two leaves a row whose file is gone,
which readers refuse anyway, because its time is over; the next turn removes nothing and says so.
"""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime

import structlog

from noetl_compactor import metrics
from noetl_core.blob.away import StoreAwayError
from noetl_core.blob.tier import Tier
from noetl_core.store import idempotency, result_ref
from noetl_core.store.postgres import Pool
from noetl_core.store.result_ref import Expired

EXPIRED_AT_ONCE = 500
DELETES_AT_ONCE = 16
"""One request to S3 is mostly waiting; more of them would crowd out those of the archives."""
KEYS_AT_ONCE = 10_000
KEY_DAYS_MIN = 1.0
"""However short the retention is: who got no answer to a request sends it again."""
BATCHES_MAX = 200
"""How many batches one turn may take."""

log = structlog.get_logger()


class Backlog:
    """Where a turn has stopped that left some to the next. That one goes on behind it: what cannot
    be removed, however much it is, hides nothing for ever."""

    def __init__(self) -> None:
        self.after: Expired | None = None

    @property
    def is_left(self) -> bool:
        return self.after is not None


async def expire(pool: Pool, tiers: Mapping[str, Tier], backlog: Backlog) -> int:
    """One turn: remove the payloads of expired results. Says how many."""
    removed = 0
    # A tier that is not configured here belongs to another compactor: its rows stay.
    reachable = {"db", *tiers}
    for _ in range(BATCHES_MAX):
        found = await result_ref.expired(
            pool, reachable, after=backlog.after, limit=EXPIRED_AT_ONCE
        )
        gone = await _delete(found, tiers, reachable)
        if gone:
            removed += await result_ref.remove_expired(pool, gone)
        backlog.after = found[-1] if len(found) == EXPIRED_AT_ONCE else None
        if not backlog.is_left:
            break
    if removed:
        metrics.RESULTS_EXPIRED.add(removed)
        log.info("result.expired", count=removed)
    return removed


async def _delete(
    found: Sequence[Expired], tiers: Mapping[str, Tier], reachable: set[str]
) -> list[Expired]:
    """Those that are gone now. What could not be removed is left to a later turn, and so is all of
    a tier that is away: the others do not wait."""
    limit = asyncio.Semaphore(DELETES_AT_ONCE)

    async def is_gone(one: Expired) -> bool:
        if one.uri is None:
            return True
        async with limit:
            return one.tier in reachable and await _is_gone(one, one.uri, tiers, reachable)

    results = await asyncio.gather(*(is_gone(one) for one in found))
    return [one for one, gone in zip(found, results, strict=True) if gone]


async def _is_gone(one: Expired, uri: str, tiers: Mapping[str, Tier], reachable: set[str]) -> bool:
    try:
        await tiers[one.tier].delete(uri)
    except FileNotFoundError:
        log.warning("result.not_ours", tier=one.tier, uri=uri)
    except StoreAwayError as error:
        # Of those that were under way together the first one tells.
        if one.tier in reachable:
            log.warning("result.not_expired", tier=one.tier, uri=uri, error=str(error))
        reachable.discard(one.tier)
        return False
    except OSError as error:
        log.warning("result.not_expired", tier=one.tier, uri=uri, error=str(error))
        return False
    return True


async def forget_keys(pool: Pool, *, before: datetime) -> int:
    """One turn: remove idempotency keys from before that moment. Says how many."""
    removed = 0
    for _ in range(BATCHES_MAX):
        gone = await idempotency.forget(pool, before=before, limit=KEYS_AT_ONCE)
        removed += gone
        if gone < KEYS_AT_ONCE:
            break
    return removed
