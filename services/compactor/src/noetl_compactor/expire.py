"""What has served its time goes: results with a `ttl`, and the keys of old requests.

A file is removed before its row says so. Dying between the two leaves a row whose file is gone,
which readers refuse anyway, because its time is over; the next turn removes nothing and says so.
"""

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
KEYS_AT_ONCE = 10_000
BATCHES_MAX = 200
"""How many batches one turn may take."""

log = structlog.get_logger()


async def expire(pool: Pool, tiers: Mapping[str, Tier]) -> int:
    """One turn: remove the payloads of expired results. Says how many."""
    removed, last = 0, None
    # A tier that is not configured here belongs to another compactor: its rows stay.
    reachable = {"db", *tiers}
    for _ in range(BATCHES_MAX):
        found = await result_ref.expired(pool, reachable, after=last, limit=EXPIRED_AT_ONCE)
        gone = await _delete(found, tiers, reachable)
        if gone:
            removed += await result_ref.remove_expired(pool, gone)
        if len(found) < EXPIRED_AT_ONCE:
            break
        last = found[-1]
    if removed:
        metrics.RESULTS_EXPIRED.add(removed)
        log.info("result.expired", count=removed)
    return removed


async def _delete(
    found: Sequence[Expired], tiers: Mapping[str, Tier], reachable: set[str]
) -> list[Expired]:
    """Those that are gone now. What could not be removed is left to a later turn, and so is all of
    a tier that is away: the others do not wait."""
    gone: list[Expired] = []
    for one in found:
        if one.tier not in reachable:
            continue
        try:
            if one.uri is not None:
                await tiers[one.tier].delete(one.uri)
        except FileNotFoundError:
            log.warning("result.not_ours", tier=one.tier, uri=one.uri)
        except (OSError, StoreAwayError) as error:
            if isinstance(error, StoreAwayError):
                reachable.discard(one.tier)
            log.warning("result.not_expired", tier=one.tier, uri=one.uri, error=str(error))
            continue
        gone.append(one)
    return gone


async def forget_keys(pool: Pool, *, before: datetime) -> int:
    """One turn: remove idempotency keys from before that moment. Says how many."""
    removed = 0
    for _ in range(BATCHES_MAX):
        gone = await idempotency.forget(pool, before=before, limit=KEYS_AT_ONCE)
        removed += gone
        if gone < KEYS_AT_ONCE:
            break
    return removed
