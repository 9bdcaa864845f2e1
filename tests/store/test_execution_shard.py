"""store/execution_shard.py: leases of shards, and the fence that a commit has to pass."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import asyncpg
import pytest

from noetl_core.domain.ids import RuntimeId, ShardId
from noetl_core.store import execution_shard
from noetl_core.store.execution_shard import Claim
from noetl_core.store.postgres import Connection, Pool

SHARD_COUNT = 16
FIRST, SECOND = RuntimeId(1), RuntimeId(2)

_EVENT: dict[str, Any] = {
    "e_execution": [10],
    "e_id": [100],
    "e_key": ["key"],
    "e_shard": [0],
    "e_type": ["step.enter"],
}
_COLUMNS_NULL = [
    "e_status",
    "e_node",
    "e_command",
    "e_loop",
    "e_index",
    "e_attempt",
    "e_parent",
    "e_parent_execution",
    "e_catalog",
    "e_epoch",
    "e_context",
    "e_result",
    "e_meta",
    "e_error",
]
_LISTS_EMPTY = [
    "x_execution",
    "x_command",
    "x_worker",
    "x_all",
    "c_execution",
    "c_command",
    "c_shard",
    "c_step",
    "c_attempt",
    "c_pool",
    "c_priority",
    "c_delay",
    "c_payload",
    "r_execution",
    "r_ref",
    "r_parent",
    "r_step",
    "r_tier",
    "r_uri",
    "r_media",
    "r_bytes",
    "r_sha256",
    "r_inline",
    "inbox_ids",
]


async def take(
    pool: Pool, owner: RuntimeId, *, limit: int = 100, lease_seconds: float = 30
) -> list[Claim]:
    return await execution_shard.claim(
        pool, "broker", owner, instance=f"b-{owner}", lease_seconds=lease_seconds, limit=limit
    )


async def lapse(pool: Pool) -> None:
    await pool.execute(
        "UPDATE noetl.execution_shard SET leased_until = now() - interval '1 second'"
        " WHERE leased_until IS NOT NULL"
    )


async def commit(
    conn: Connection | Pool, claim: Claim, *, key: str = "key", event_id: int = 100
) -> None:
    """One event through noetl.commit_batch, under the epoch of the claim."""
    arguments = (
        {"fence_shard": [claim.shard_id], "fence_epoch": [claim.epoch]}
        | _EVENT
        | {"e_key": [key], "e_id": [event_id]}
        | {name: [None] for name in _COLUMNS_NULL}
        | {name: [] for name in _LISTS_EMPTY}
    )
    names = ", ".join(f"{name} => ${i}" for i, name in enumerate(arguments, 1))
    await conn.execute(f"SELECT noetl.commit_batch({names})", *arguments.values())


async def test_two_claimers_never_get_the_same_shard(pool: Pool) -> None:
    claims = await asyncio.gather(*(take(pool, RuntimeId(owner), limit=5) for owner in range(1, 9)))

    shards = [claim.shard_id for taken in claims for claim in taken]
    assert len(shards) == len(set(shards))


async def test_claiming_until_nothing_is_left_gives_every_shard_once(pool: Pool) -> None:
    first = await take(pool, FIRST, limit=10)
    second = await take(pool, SECOND)

    assert len(first) == 10
    assert len(first) + len(second) == SHARD_COUNT


async def test_a_lease_that_ran_out_is_claimed_and_the_epoch_rises(pool: Pool) -> None:
    first = await take(pool, FIRST)
    await lapse(pool)

    second = await take(pool, SECOND)

    assert [c.epoch for c in second] == [c.epoch + 1 for c in first]
    assert await execution_shard.renew(pool, "broker", FIRST, lease_seconds=30) == []


async def test_a_living_lease_is_not_claimed(pool: Pool) -> None:
    await take(pool, FIRST)

    assert await take(pool, SECOND) == []


async def test_renewing_keeps_the_epoch_even_after_the_lease_ran_out(pool: Pool) -> None:
    claims = await take(pool, FIRST)
    await lapse(pool)

    assert await execution_shard.renew(pool, "broker", FIRST, lease_seconds=30) == claims
    assert await execution_shard.owned(pool, "broker", FIRST) == claims


async def test_released_shards_are_free_at_once_and_the_others_stay(pool: Pool) -> None:
    await take(pool, FIRST)

    await execution_shard.release(pool, "broker", FIRST, [ShardId(3), ShardId(4)])

    assert [c.shard_id for c in await take(pool, SECOND)] == [3, 4]
    assert len(await execution_shard.owned(pool, "broker", FIRST)) == SHARD_COUNT - 2


async def test_the_roles_of_a_shard_are_held_independently(pool: Pool) -> None:
    await take(pool, FIRST)

    claims = await execution_shard.claim(
        pool, "projection", SECOND, instance="p", lease_seconds=30, limit=100
    )

    assert len(claims) == SHARD_COUNT


async def test_a_commit_under_the_epoch_of_the_claim_passes(pool: Pool) -> None:
    claim = (await take(pool, FIRST))[0]

    await commit(pool, claim)

    assert await pool.fetchval("SELECT count(*) FROM noetl.event") == 1


async def test_a_commit_under_an_old_epoch_is_refused_and_writes_nothing(pool: Pool) -> None:
    old = (await take(pool, FIRST))[0]
    await lapse(pool)
    await take(pool, SECOND)

    with pytest.raises(asyncpg.PostgresError) as caught:
        await commit(pool, old)

    assert caught.value.sqlstate == "NS001"
    assert await pool.fetchval("SELECT count(*) FROM noetl.event") == 0


async def test_a_commit_that_is_under_way_keeps_its_shard_from_being_claimed(pool: Pool) -> None:
    """Otherwise the new owner could read the log before the old one's last commit is in it."""
    claim = (await take(pool, FIRST))[0]
    await lapse(pool)
    async with pool.acquire() as conn, conn.transaction():
        await commit(conn, claim)
        during = await take(pool, SECOND)

    after = await take(pool, SECOND)

    assert claim.shard_id not in {c.shard_id for c in during}
    assert [c.shard_id for c in after] == [claim.shard_id]


async def test_of_two_commits_of_one_key_only_the_first_passes(pool: Pool) -> None:
    claim = (await take(pool, FIRST))[0]

    answers = await asyncio.gather(
        *(commit(pool, claim, key="same", event_id=event_id) for event_id in (100, 101)),
        return_exceptions=True,
    )

    errors = [answer for answer in answers if answer is not None]
    assert [type(error) for error in errors] == [asyncpg.UniqueViolationError]
    assert "key_idx" in str(errors[0]), "not the key refused it"
    assert await pool.fetchval("SELECT count(*) FROM noetl.event") == 1


async def test_a_look_tells_who_holds_what_and_who_let_a_lease_run_out(pool: Pool) -> None:
    await take(pool, FIRST, limit=6)
    await lapse(pool)
    await take(pool, SECOND, limit=4)

    rows = await execution_shard.look(pool, "broker")

    assert len(rows) == SHARD_COUNT
    assert [row.owner for row in rows if row.is_leased] == [SECOND] * 4
    assert [row.owner for row in rows if row.owner and not row.is_leased] == [FIRST] * 2


async def test_of_two_that_claim_at_once_the_one_it_is_meant_for_gets_the_shard(
    pool: Pool,
) -> None:
    await take(pool, FIRST)
    await execution_shard.want(pool, "broker", {ShardId(5): SECOND})
    await execution_shard.release(pool, "broker", FIRST, [ShardId(5)])

    taken = await asyncio.gather(
        *(take(pool, RuntimeId(owner)) for owner in (7, 8, 9)), take(pool, SECOND)
    )

    assert [[c.shard_id for c in claims] for claims in taken] == [[], [], [], [5]]


async def test_a_wish_of_before_does_not_keep_an_orphan_from_being_claimed(pool: Pool) -> None:
    await take(pool, FIRST)
    await execution_shard.want(pool, "broker", {ShardId(5): RuntimeId(77)})
    await lapse(pool)

    assert len(await take(pool, SECOND)) == SHARD_COUNT


async def inherit(conn: Connection) -> None:
    await execution_shard.inherit(conn, "broker", SECOND, instance=f"b-{FIRST}")


async def retire(conn: Connection) -> None:
    await execution_shard.retire(conn, quiet_seconds=0)


_SHRUNK = """
WITH shrunk AS (UPDATE noetl.setting SET value = '1' WHERE name = 'shard_count')
INSERT INTO noetl.resize (resize_id, shards_from, shards_to, switch_id, switched_at)
VALUES (1, 16, 1, 1, now() - interval '1 hour')
"""


@pytest.mark.parametrize("change", [inherit, retire])
async def test_who_changes_many_shards_locks_them_in_the_order_of_a_commit(
    pool: Pool, change: Callable[[Connection], Coroutine[Any, Any, None]]
) -> None:
    """Otherwise a commit that holds the first one would wait for a later one, and we for it."""
    await take(pool, FIRST)
    await pool.execute(_SHRUNK)
    await in_backward_order(pool)
    async with pool.acquire() as committing, pool.acquire() as changing:
        # What is left is to take the rows as they lie.
        for way in ("indexscan", "bitmapscan", "mergejoin", "hashjoin"):
            await changing.execute(f"SET enable_{way} = off")
        async with committing.transaction():
            await lock(committing, 1)
            changed = asyncio.create_task(change(changing))
            await until_somebody_waits(pool)
            await committing.execute("SET LOCAL lock_timeout = '500ms'")
            await lock(committing, 9)
        async with asyncio.timeout(60):
            await changed

    assert len(await execution_shard.owned(pool, "broker", FIRST)) <= 1


async def in_backward_order(pool: Pool) -> None:
    """As the rows lie, so they are found by whoever reads the table from end to end."""
    await pool.execute(
        "WITH gone AS (DELETE FROM noetl.execution_shard RETURNING *)"
        " INSERT INTO noetl.execution_shard SELECT * FROM gone ORDER BY shard_id DESC"
    )
    found = await pool.fetch(
        "SELECT shard_id FROM noetl.execution_shard WHERE role = 'broker' ORDER BY ctid"
    )
    assert [row["shard_id"] for row in found] == list(reversed(range(SHARD_COUNT)))


async def lock(conn: Connection, shard_id: int) -> None:
    await conn.execute(
        "SELECT FROM noetl.execution_shard WHERE role = 'broker' AND shard_id = $1 FOR SHARE",
        shard_id,
    )


_WAITS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock'
"""


async def until_somebody_waits(pool: Pool) -> None:
    async with asyncio.timeout(60):
        while not await pool.fetchval(_WAITS):  # noqa: ASYNC110 - Postgres does not call us
            await asyncio.sleep(0.02)
