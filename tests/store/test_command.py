"""The queue of record: who gets what, in which order, and for how long."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest

from noetl_core.domain.ids import CommandId, ExecutionId, ShardId, WorkerId
from noetl_core.store.batch import Batch, EndedRow, commit
from noetl_core.store.command import (
    QUEUE_SETTINGS,
    CommandKey,
    Leased,
    expired,
    give_back,
    give_back_strays,
    give_up_all,
    heartbeat,
    held_by,
    lease,
    leave_to_others,
    next_available,
)
from noetl_core.store.postgres import Connection, Pool, open_pool

A, B = WorkerId("worker-a"), WorkerId("worker-b")
EXECUTION = ExecutionId(1)


async def insert(
    pool: Pool,
    name: str,
    *,
    priority: int = 0,
    delay: float = 0.0,
    target: str | None = None,
    target_seconds: float = 0.0,
    work_pool: str = "cpu",
    requires: list[str] | None = None,
) -> CommandKey:
    await pool.execute(
        "INSERT INTO noetl.command (execution_id, command_id, shard_id, step, payload, pool,"
        " priority, available_at, target_worker, target_until, requires)"
        " VALUES ($1, $2, 3, 's', $3, $4, $5,"
        " now() + make_interval(secs => $6), $7, now() + make_interval(secs => $8), $9)",
        EXECUTION,
        name,
        name.encode(),
        work_pool,
        priority,
        delay,
        target,
        target_seconds,
        requires,
    )
    return EXECUTION, CommandId(name)


async def take(pool: Pool, worker: WorkerId = A, limit: int = 10) -> list[str]:
    return [row.command_id for row in await take_rows(pool, worker, limit)]


async def take_rows(pool: Pool, worker: WorkerId = A, limit: int = 10) -> list[Leased]:
    return await lease(pool, worker, ["cpu"], limit=limit, lease_seconds=60)


async def test_two_workers_at_once_never_get_the_same_command(pool: Pool) -> None:
    for n in range(200):
        await insert(pool, f"c{n}")

    batches = await asyncio.gather(
        *(take(pool, worker, limit=7) for worker in (A, B) for _ in range(20))
    )

    taken = [name for batch in batches for name in batch]
    assert len(taken) == len(set(taken)) == 200


async def test_a_lease_brings_everything_that_is_needed_to_run(pool: Pool) -> None:
    await insert(pool, "c")

    (leased,) = await take_rows(pool)

    assert leased == Leased(EXECUTION, CommandId("c"), 3, "s", 1, "cpu", b"c")  # type: ignore[arg-type]


async def test_the_most_urgent_comes_first_and_the_limit_holds(pool: Pool) -> None:
    await insert(pool, "old")
    await insert(pool, "urgent", priority=5)
    await insert(pool, "new")

    assert await take(pool, limit=2) in (["urgent", "old"], ["old", "urgent"])
    assert await take(pool, limit=2) == ["new"]
    assert await take(pool, limit=2) == []


async def test_a_delayed_command_waits_and_says_for_how_long(pool: Pool) -> None:
    await insert(pool, "later", delay=30)

    assert await take(pool) == []
    ready_in = await next_available(pool, ["cpu"], within_seconds=60)
    assert ready_in is not None
    assert 25 < ready_in <= 30
    assert await next_available(pool, ["cpu"], within_seconds=10) is None


async def test_a_targeted_command_is_its_workers_until_its_time_is_up(pool: Pool) -> None:
    await insert(pool, "mine", target=A, target_seconds=60)
    await insert(pool, "anyone's", target=A, target_seconds=0)

    assert await take(pool, B) == ["anyone's"]
    assert await take(pool, A) == ["mine"]


async def test_other_pools_are_not_touched(pool: Pool) -> None:
    await insert(pool, "gpu", work_pool="gpu")

    assert await take(pool) == []
    assert [r.command_id for r in await lease(
        pool, A, ["cpu", "gpu"], limit=1, lease_seconds=60
    )] == ["gpu"]  # fmt: skip


async def test_a_heartbeat_says_what_is_still_ours(pool: Pool) -> None:
    ours, gone, theirs = [await insert(pool, name) for name in ("ours", "gone", "theirs")]
    await take(pool)
    await pool.execute("DELETE FROM noetl.command WHERE command_id = 'gone'")
    await pool.execute("UPDATE noetl.command SET worker_id = $1 WHERE command_id = 'theirs'", B)
    await pool.execute("UPDATE noetl.command SET lease_until = now()")

    kept = await heartbeat(pool, A, [ours, gone, theirs], lease_seconds=60)

    assert kept == {ours}
    assert [row.command_id for row in await expired(pool, limit=1000)] == ["theirs"]


async def test_a_heartbeat_takes_back_a_lease_that_postgres_has_forgotten(pool: Pool) -> None:
    key = await insert(pool, "c")
    await take(pool)
    await forget_leases(pool)

    kept = await heartbeat(pool, A, [key], lease_seconds=60)

    assert kept == {key}
    assert await take(pool, B) == []
    assert await heartbeat(pool, B, [key], lease_seconds=60) == set()


async def test_a_forgotten_lease_that_another_worker_has_taken_is_lost(pool: Pool) -> None:
    key = await insert(pool, "c")
    await take(pool)
    await forget_leases(pool)
    await take(pool, B)

    assert await heartbeat(pool, A, [key], lease_seconds=60) == set()
    assert [row.command_id for row in await held_by(pool, B)] == ["c"]


async def test_a_worker_can_ask_what_it_holds(pool: Pool) -> None:
    for name in ("a", "b"):
        await insert(pool, name)
    leased = await take_rows(pool, limit=1)
    await take(pool, B)

    assert await held_by(pool, A) == leased


async def test_what_a_predecessor_of_the_same_name_held_is_not_held_by_its_successor(
    pool: Pool,
) -> None:
    for name in ("old", "new"):
        await insert(pool, name)
    (old,) = await take(pool, limit=1)
    await give_up_all(pool, A)
    own = await take_rows(pool)

    assert await held_by(pool, A) == own
    assert [row.command_id for row in await expired(pool, limit=1000)] == [old]


async def forget_leases(pool: Pool) -> None:
    """As a crash of Postgres does to what was not on disk yet."""
    await pool.execute(
        "UPDATE noetl.command SET status = 'pending', worker_id = NULL, lease_until = NULL,"
        " last_heartbeat = NULL"
    )


async def test_a_heartbeat_never_waits_for_a_broker_that_is_committing(pool: Pool) -> None:
    key = await insert(pool, "c")
    await take(pool)

    async with pool.acquire() as broker:
        transaction = broker.transaction()
        await transaction.start()
        await broker.execute("DELETE FROM noetl.command")
        async with asyncio.timeout(60):
            kept = await heartbeat(pool, A, [key], lease_seconds=60)
        await transaction.rollback()

    # Not committed: it may yet be rolled back, so the command is still ours.
    assert kept == {key}


async def test_who_gives_up_commands_never_waits_for_a_broker_that_is_committing(
    pool: Pool,
) -> None:
    keys = [await insert(pool, name) for name in ("a", "b", "c")]
    await take(pool)

    async with pool.acquire() as broker:
        transaction = broker.transaction()
        await transaction.start()
        await broker.execute("DELETE FROM noetl.command WHERE command_id = 'b'")
        async with asyncio.timeout(60):
            await give_back(pool, A, keys[:2])
            given_back = [row.command_id for row in await expired(pool, limit=1000)]
            await give_up_all(pool, A)
            given_up = [row.command_id for row in await expired(pool, limit=1000)]
        await transaction.rollback()

    # The one that was not deleted after all is held until its lease runs out.
    assert given_back == ["a"]
    assert sorted(given_up) == ["a", "c"]
    assert await heartbeat(pool, A, keys, lease_seconds=60) == {keys[1], keys[2]}


async def test_a_lease_expires_after_its_grace(pool: Pool) -> None:
    key = await insert(pool, "c")
    await lease(pool, A, ["cpu"], limit=1, lease_seconds=-5)

    (row,) = await expired(pool, limit=10, grace_seconds=1)

    assert (row.execution_id, row.command_id) == key
    assert row.worker_id == A
    assert row.overdue_seconds >= 5
    assert await expired(pool, limit=10, grace_seconds=20) == []


async def test_what_is_given_back_is_expired_at_once_and_never_renewed(pool: Pool) -> None:
    key = await insert(pool, "c")
    await take(pool)
    assert await expired(pool, limit=1000) == []

    await give_back(pool, B, [key])
    assert await expired(pool, limit=1000) == []
    await give_back(pool, A, [key])

    assert [row.command_id for row in await expired(pool, limit=1000)] == ["c"]
    assert await heartbeat(pool, A, [key], lease_seconds=60) == set()
    assert [row.command_id for row in await expired(pool, limit=1000)] == ["c"]


async def test_a_worker_gets_only_what_it_has_everything_for(pool: Pool) -> None:
    await insert(pool, "anyone")
    await insert(pool, "gpu", requires=["gpu=true"])
    await insert(pool, "both", requires=["gpu=true", "tool:acme.mailer"])

    async def taken(*offers: str) -> list[str]:
        rows = await lease(pool, A, ["cpu"], limit=10, lease_seconds=60, offers=offers)
        return [row.command_id for row in rows]

    assert await taken("zone=eu") == ["anyone"]
    assert await taken("gpu=true", "tool:noop") == ["gpu"]
    (last,) = await lease(
        pool, B, ["cpu"], limit=10, lease_seconds=60, offers=["gpu=true", "tool:acme.mailer"]
    )
    assert last.requires == ["gpu=true", "tool:acme.mailer"]


async def test_a_worker_of_several_pools_takes_from_the_first_first(pool: Pool) -> None:
    await insert(pool, "c1")
    await insert(pool, "g1", work_pool="gpu")
    await insert(pool, "other", work_pool="other")

    rows = await lease(pool, A, ["gpu", "cpu"], limit=1, lease_seconds=60)
    rows += await lease(pool, A, ["gpu", "cpu"], limit=10, lease_seconds=60)

    assert [(row.pool, row.command_id) for row in rows] == [("gpu", "g1"), ("cpu", "c1")]


LONG = 20_000
_FILL = (
    "INSERT INTO noetl.command (execution_id, command_id, shard_id, step, payload)"
    f" SELECT 1, 'c' || n, 0, 's', 'p' FROM generate_series(1, {LONG}) AS n"
)
_COUNT = "ANALYZE noetl.command"


@pytest.mark.parametrize(
    "history",
    [[_FILL, _COUNT], [_FILL, "DELETE FROM noetl.command", _COUNT, _FILL]],
    ids=["counted when full", "counted when empty"],
)
async def test_a_long_queue_costs_no_more_than_a_short_one(
    database: str, history: list[str]
) -> None:
    async with (
        open_pool(database, role="", size_max=1, settings=QUEUE_SETTINGS) as pool,
        pool.acquire() as conn,
    ):
        for statement in history:
            await conn.execute(statement)
        read: dict[str, int] = {}

        async with rows_read(conn, "lease", read):
            leased = await lease(conn, A, ["cpu"], limit=16, lease_seconds=60)
        keys = [row.key for row in leased]
        async with rows_read(conn, "heartbeat", read):
            await heartbeat(conn, A, keys, lease_seconds=600)
        async with rows_read(conn, "strays", read):
            now = datetime.now(UTC) + timedelta(hours=1)
            await give_back_strays(conn, A, keys, leased_before=now, lease_seconds=60)
        async with rows_read(conn, "commit", read):
            ended = Batch()
            ended.fences = {ShardId(0): 0}
            ended.ended = [EndedRow(*key, A) for key in keys]
            await commit(conn, ended)

    assert len(keys) == 16
    assert {what: count for what, count in read.items() if count > 200} == {}
    assert read.keys() == {"lease", "heartbeat", "strays", "commit"}


@asynccontextmanager
async def rows_read(conn: Connection, what: str, read: dict[str, int]) -> AsyncIterator[None]:
    """How many rows of the queue are read meanwhile."""
    look = (
        "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables"
        " WHERE schemaname = 'noetl' AND relname = 'command'"
    )
    await conn.execute("SELECT pg_stat_force_next_flush()")  # what was read before does not count
    async with conn.transaction():
        yield
        read[what] = await conn.fetchval(look)


async def test_what_is_meant_for_a_worker_comes_before_a_queue_that_is_older(pool: Pool) -> None:
    for n in range(50):
        await insert(pool, f"old-{n}")
    await insert(pool, "mine", target=A, target_seconds=60)
    await insert(pool, "was mine", target=A, target_seconds=-1)
    await insert(pool, "hers", target=B, target_seconds=60)

    taken = await take(pool, limit=8)

    assert len(taken) == len(set(taken)) == 8
    assert {"mine", "was mine"} <= set(taken)
    assert "hers" not in taken


async def test_what_is_meant_for_a_worker_of_another_pool_is_left_there(pool: Pool) -> None:
    await insert(pool, "elsewhere", target=A, target_seconds=60, work_pool="gpu")

    assert await take(pool, limit=8) == []


async def test_what_was_meant_for_a_worker_that_stops_is_for_anyone(pool: Pool) -> None:
    await insert(pool, "mine", target=A, target_seconds=60)
    await insert(pool, "hers", target=B, target_seconds=60)

    await leave_to_others(pool, A)

    assert await take(pool, WorkerId("c")) == ["mine"]


async def test_what_is_more_urgent_goes_before_what_is_meant_for_the_worker(pool: Pool) -> None:
    await insert(pool, "mine", target=A, target_seconds=60)
    await insert(pool, "urgent", priority=5)
    await insert(pool, "anyone")

    assert await take(pool, limit=1) == ["urgent"]
    assert await take(pool, limit=1) == ["mine"]
    assert await take(pool, B, limit=1) == ["anyone"]
