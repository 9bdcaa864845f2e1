"""store/runtime.py: registration, and the lease of a snowflake node number."""

import asyncio
from itertools import count

from noetl_core.domain.ids import RuntimeId
from noetl_core.store import component, runtime, topology
from noetl_core.store.component import Component
from noetl_core.store.postgres import Pool
from noetl_core.store.runtime import Registration

_ids = count(1000)


def runtime_id_of(_node: int) -> int:
    return next(_ids)


async def enrol(pool: Pool, name: str, *, kind: str = "broker") -> tuple[RuntimeId, int]:
    async with pool.acquire() as conn, conn.transaction():
        return await runtime.register(conn, Registration(name=name, kind=kind), runtime_id_of)


async def grow_old(pool: Pool, runtime_id: RuntimeId, *, seconds: float) -> None:
    await pool.execute(
        "UPDATE noetl.runtime SET heartbeat = now() - make_interval(secs => $2)"
        " WHERE runtime_id = $1",
        runtime_id,
        seconds,
    )


async def test_node_numbers_are_distinct_under_concurrency(pool: Pool) -> None:
    enrolled = await asyncio.gather(*(enrol(pool, f"broker-{i}") for i in range(20)))

    assert sorted(node for _, node in enrolled) == list(range(20))


async def test_the_node_of_a_silent_process_is_taken_again_after_its_lease(pool: Pool) -> None:
    silent, node = await enrol(pool, "silent")
    await grow_old(pool, silent, seconds=runtime.NODE_LEASE_SECONDS + 1)

    _, taken = await enrol(pool, "fresh")

    assert taken == node
    assert await runtime.heartbeat(pool, silent, name="silent") is None


async def test_a_process_that_died_is_shown_as_offline_when_its_number_is_taken(pool: Pool) -> None:
    silent, _ = await enrol(pool, "silent")
    await grow_old(pool, silent, seconds=runtime.NODE_LEASE_SECONDS + 1)
    await enrol(pool, "fresh")

    shown = await component.registered(pool, limit=10)

    assert [(row["name"], row["status"]) for row in shown] == [
        ("fresh", "ready"),
        ("silent", "offline"),
    ]
    assert await runtime.live_count(pool, "broker") == 1
    stranger = Component(kind="broker", name="silent")
    assert await component.register(pool, RuntimeId(1), stranger) is None
    assert await component.heartbeat(pool, kind="broker", name="silent", report={}) is None
    assert await component.deregister(pool, kind="broker", name="silent") is None


async def test_a_process_that_slept_through_its_lease_is_the_same_with_another_number(
    pool: Pool,
) -> None:
    silent, node = await enrol(pool, "silent")
    await grow_old(pool, silent, seconds=runtime.NODE_LEASE_SECONDS + 1)
    await enrol(pool, "fresh")

    async with pool.acquire() as conn, conn.transaction():
        again = await runtime.register(
            conn, Registration(name="silent", kind="broker"), runtime_id_of, runtime_id=silent
        )

    assert again[0] == silent
    assert again[1] != node
    assert await runtime.live_count(pool, "broker") == 2


async def test_its_successor_is_shown_and_not_it(pool: Pool) -> None:
    silent, _ = await enrol(pool, "broker-0")
    await grow_old(pool, silent, seconds=runtime.NODE_LEASE_SECONDS + 1)
    await enrol(pool, "broker-0")
    await enrol(pool, "broker-1")

    shown = await component.registered(pool, limit=10)

    assert [row["name"] for row in shown] == ["broker-0", "broker-1"]


async def test_who_promised_few_heartbeats_may_be_silent_for_three_of_them(pool: Pool) -> None:
    for name, interval, silent in (
        ("a", 30, 80),
        ("b", 30, 95),
        ("c", 1, 14),
        ("d", None, 16),
        ("e", 3600, 290),
        ("f", 3600, 310),
    ):
        one, _ = await enrol(pool, name, kind="worker")
        said = {} if interval is None else {"heartbeat_interval_seconds": interval}
        await runtime.heartbeat(pool, one, name=name, report=said)
        await grow_old(pool, one, seconds=silent)
    await pool.execute("UPDATE noetl.runtime SET status = 'ready', node = runtime_id % 1024")

    assert [one.worker_id for one in await runtime.live_workers(pool)] == ["a", "c", "e"]
    assert len(await topology.living(pool, kind="worker")) == 3
    stale = await topology.mark_stale(pool, silent_seconds=45)
    assert {one.name for one in stale} == {"b", "f"}


async def test_a_heartbeat_says_the_capacity_and_when_it_came(pool: Pool) -> None:
    one, _ = await enrol(pool, "w", kind="worker")
    await pool.execute("UPDATE noetl.runtime SET updated_at = now() - interval '1 hour'")

    await runtime.heartbeat(pool, one, name="w", report={"slots": 12})

    row = await pool.fetchrow("SELECT capacity, now() - updated_at FROM noetl.runtime")
    assert row is not None
    assert row[0] == 12
    assert row[1].total_seconds() < 60


async def test_the_node_of_a_process_that_left_stays_taken_until_its_lease_is_over(
    pool: Pool,
) -> None:
    gone, node = await enrol(pool, "gone")
    await runtime.mark_offline(pool, [gone])

    _, other = await enrol(pool, "fresh")

    assert other != node


async def test_a_successor_of_the_same_name_gets_a_node_of_its_own(pool: Pool) -> None:
    first, first_node = await enrol(pool, "broker-0")

    second, second_node = await enrol(pool, "broker-0")

    assert (second, second_node) != (first, first_node)
    beat = await runtime.heartbeat(pool, first, name="broker-0")
    assert beat is not None
    assert beat.name != "broker-0"


async def test_only_fresh_and_ready_members_of_the_kind_count_as_alive(pool: Pool) -> None:
    silent, _ = await enrol(pool, "silent")
    gone, _ = await enrol(pool, "gone")
    await enrol(pool, "alive")
    await enrol(pool, "worker", kind="worker")
    await grow_old(pool, silent, seconds=runtime.LIVE_SECONDS + 1)
    await runtime.mark_offline(pool, [gone])

    assert await runtime.live_count(pool, "broker") == 1


async def test_a_heartbeat_brings_back_who_was_marked_offline(pool: Pool) -> None:
    alive, _ = await enrol(pool, "alive")
    await runtime.mark_offline(pool, [alive])

    await runtime.heartbeat(pool, alive, name="alive")

    assert await runtime.live_count(pool, "broker") == 1
