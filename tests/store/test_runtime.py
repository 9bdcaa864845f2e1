"""store/runtime.py: registration, and the lease of a snowflake node number."""

import asyncio
from itertools import count

from noetl_core.domain.ids import RuntimeId
from noetl_core.store import runtime
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
