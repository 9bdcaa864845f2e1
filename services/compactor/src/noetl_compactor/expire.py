"""What has served its time goes: results with a `ttl`, and the keys of old requests.

A file is removed before its row says so. Dying between the two leaves a row whose file is gone,
which readers refuse anyway, because its time is over; the next turn removes nothing and says so.
"""

from collections.abc import Mapping
from datetime import datetime

import structlog

from noetl_compactor import metrics
from noetl_core.blob.away import StoreAwayError
from noetl_core.blob.tier import Tier
from noetl_core.store import idempotency, result_ref
from noetl_core.store.postgres import Pool
from noetl_core.store.result_ref import Expired

EXPIRED_AT_ONCE = 500
KEYS_AT_ONCE = 10_000
BATCHES_MAX = 200
"""How many batches one turn may take."""

log = structlog.get_logger()


async def expire(pool: Pool, tiers: Mapping[str, Tier]) -> int:
    """One turn: remove the payloads of expired results. Says how many."""
    removed, last = 0, None
    for _ in range(BATCHES_MAX):
        # A tier that is not configured here belongs to another compactor: its rows stay.
        found = await result_ref.expired(pool, ["db", *tiers], after=last, limit=EXPIRED_AT_ONCE)
        gone = [one for one in found if await _is_gone(one, tiers)]
        if gone:
            removed += await result_ref.remove_expired(pool, gone)
        if len(found) < EXPIRED_AT_ONCE:
            break
        last = found[-1]
    if removed:
        metrics.RESULTS_EXPIRED.add(removed)
        log.info("result.expired", count=removed)
    return removed


async def _is_gone(one: Expired, tiers: Mapping[str, Tier]) -> bool:
    """False: its file could not be removed. A later turn tries again, the others do not wait."""
    if one.uri is None:
        return True
    try:
        await tiers[one.tier].delete(one.uri)
    except (OSError, StoreAwayError) as error:
        log.warning("result.not_removed", tier=one.tier, uri=one.uri, error=str(error))
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
