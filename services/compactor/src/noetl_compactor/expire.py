"""What has served its time goes: results with a `ttl`, and the keys of old requests.

A file is removed before its row says so. Dying between the two leaves a row whose file is gone,
which readers refuse anyway, because its time is over; the next turn removes nothing and says so.
"""

from collections.abc import Mapping
from datetime import datetime

import structlog

from noetl_compactor import metrics
from noetl_core.blob.tier import Tier
from noetl_core.store import idempotency, result_ref
from noetl_core.store.postgres import Pool

EXPIRED_AT_ONCE = 500
KEYS_AT_ONCE = 10_000
BATCHES_MAX = 200
"""How many batches one turn may take."""

log = structlog.get_logger()


async def expire(pool: Pool, tiers: Mapping[str, Tier]) -> int:
    """One turn: remove the payloads of expired results. Says how many."""
    removed = 0
    for _ in range(BATCHES_MAX):
        found = await result_ref.expired(pool, limit=EXPIRED_AT_ONCE)
        # A tier that is not configured here belongs to another compactor: its rows stay.
        ours = [one for one in found if one.tier == "db" or one.tier in tiers]
        for one in ours:
            if one.uri is not None:
                await tiers[one.tier].delete(one.uri)
        if ours:
            removed += await result_ref.remove_expired(pool, ours)
        if len(found) < EXPIRED_AT_ONCE or not ours:
            break
    if removed:
        metrics.RESULTS_EXPIRED.add(removed)
        log.info("result.expired", count=removed)
    return removed


async def forget_keys(pool: Pool, *, before: datetime) -> int:
    """One turn: remove idempotency keys from before that moment. Says how many."""
    removed = 0
    for _ in range(BATCHES_MAX):
        gone = await idempotency.forget(pool, before=before, limit=KEYS_AT_ONCE)
        removed += gone
        if gone < KEYS_AT_ONCE:
            break
    return removed
