"""Where results are, and the ordered results of a loop."""

from noetl_core.domain.ids import ExecutionId, LoopId, RefId
from noetl_core.store import manifest
from noetl_core.store.postgres import Pool
from noetl_core.store.result_ref import StoredRow, find, of_loop

EXECUTION, LOOP = ExecutionId(1), LoopId(10)


async def end_iteration(pool: Pool, index: int, event_id: int, kind: str = "call.done") -> None:
    await pool.execute(
        "INSERT INTO noetl.event (execution_id, event_id, event_key, shard_id, event_type,"
        " loop_id, iter_index) VALUES ($1, $2, $3, 0, $4, $5, $6)",
        EXECUTION,
        event_id,
        f"end:{event_id}",
        kind,
        LOOP,
        index,
    )


async def put(pool: Pool, ref_id: int, body: bytes) -> None:
    await pool.execute(
        "INSERT INTO noetl.result_ref (execution_id, ref_id, step, store_tier, bytes, inline)"
        " VALUES ($1, $2, 's', 'db', $3, $4)",
        EXECUTION,
        ref_id,
        len(body),
        body,
    )


async def test_only_what_is_stored_is_found(pool: Pool) -> None:
    await put(pool, 5, b"[]")

    found = await find(pool, EXECUTION, [RefId(5), RefId(6)])

    assert found == {RefId(5): StoredRow("db", None, "application/json", 2, None, b"[]")}


async def test_the_results_of_a_loop_come_in_the_order_of_its_items(pool: Pool) -> None:
    for index, event_id in ((2, 11), (0, 12), (1, 13)):
        await end_iteration(pool, index, event_id)
        await put(pool, event_id, b"%d" % index)
    await end_iteration(pool, 3, 14)
    await end_iteration(pool, 4, 15, "call.error")
    await put(pool, 15, b"4")

    found = await of_loop(pool, EXECUTION, LOOP)

    bodies = [(item.iter_index, item.row and item.row.inline) for item in found]
    assert bodies == [(0, b"0"), (1, b"1"), (2, b"2"), (3, None)]


async def test_a_collection_knows_its_size_and_its_parts(pool: Pool) -> None:
    await pool.execute(
        "INSERT INTO noetl.manifest (execution_id, manifest_id, kind, item_count, part_count)"
        " VALUES ($1, $2, 'collection', 3, 1)",
        EXECUTION,
        LOOP,
    )
    await pool.execute(
        "INSERT INTO noetl.manifest_part (execution_id, manifest_id, part_index, item_count,"
        " store_tier, bytes, inline) VALUES ($1, $2, 0, 3, 'db', 7, '[1,2,3]')",
        EXECUTION,
        LOOP,
    )

    assert await manifest.item_count(pool, EXECUTION, LOOP) == 3
    part = await manifest.part(pool, EXECUTION, LOOP, part_index=0)
    assert part is not None
    assert part.inline == b"[1,2,3]"
    assert await manifest.part(pool, EXECUTION, LOOP, part_index=1) is None
    assert await manifest.item_count(pool, EXECUTION, LoopId(99)) is None
