"""Changes the number of shards: docs/adr/0015-the-shard-count-changes-in-one-commit.md."""

from collections.abc import Callable
from contextlib import suppress

import asyncpg
import structlog

from noetl_core.bus.connection import Bus
from noetl_core.domain.errors import ConflictError
from noetl_core.domain.ids import EventId
from noetl_core.store import event, execution_shard, resize
from noetl_core.store.execution_shard import ROLES
from noetl_core.store.postgres import Connection, Pool
from noetl_core.wire.subjects import shards_wake

# All commits wait while we wait for one of them: rather come again than hold them up for long.
_BE_BRIEF = "SET LOCAL lock_timeout = '2s'"

log = structlog.get_logger()


async def switch(pool: Pool, bus: Bus, *, mint_above: Callable[[int], int]) -> bool:
    """One turn: grant a wish for another shard count, if there is one. True when it was."""
    if await resize.open_wish(pool) is None:
        return False
    try:
        async with pool.acquire() as conn, conn.transaction():
            is_switched = await _switch(conn, mint_above)
    except asyncpg.LockNotAvailableError:
        log.warning("shards.switch_put_off", reason="a commit holds a shard for longer than 2 s")
        return False
    for role in ROLES:
        await bus.wake(shards_wake(role))
    return is_switched


async def wish_for_first(pool: Pool, *, shard_count: int, mint: Callable[[], int]) -> None:
    """A system whose shard count nobody has changed yet gets the one that is configured.

    Later the database alone counts: a setting that was left behind must not undo a resize.
    """
    now = (await resize.current(pool)).shard_count
    if now != shard_count and await resize.newest(pool) is None:
        with suppress(ConflictError):  # somebody has just wished for another one
            await resize.request(pool, mint(), shards_from=now, shards_to=shard_count)


async def _switch(conn: Connection, mint_above: Callable[[int], int]) -> bool:
    await conn.execute(_BE_BRIEF)
    wish = await resize.open_wish(conn, is_locked=True)
    if wish is None:
        return False
    shards = await execution_shard.lock_all(conn)
    now = await resize.current(conn)
    if now.shard_count != wish.shards_from:
        reason = f"there were {now.shard_count} shards, not {wish.shards_from}"
        await resize.refuse(conn, wish.resize_id, reason)
        return False
    newest = await event.newest_event_id(conn, shards)
    switch_id = EventId(mint_above(max(newest, now.switch_id)))
    await execution_shard.begin_anew(conn, shard_count=wish.shards_to)
    await resize.record_switch(conn, wish, switch_id)
    log.info(
        "shards.switched",
        shards_from=wish.shards_from,
        shards_to=wish.shards_to,
        switch_id=switch_id,
    )
    return True


async def clear_up(pool: Pool, *, quiet_seconds: float) -> None:
    """One turn: note that a switch is drained, set aside the shards that nothing goes to."""
    if await resize.mark_drained(pool):
        log.info("shards.drained")
    retired = await execution_shard.retire(pool, quiet_seconds=quiet_seconds)
    if retired:
        log.info("shards.retired", shard_ids=retired)
