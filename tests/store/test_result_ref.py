"""Where results are, and what manifests list."""

from noetl_core.domain.ids import ExecutionId, LoopId, RefId
from noetl_core.store import manifest
from noetl_core.store.postgres import Pool
from noetl_core.store.result_ref import StoredRow, find, find_each
from support.loop_log import NOTHING, LoopLog

EXECUTION, LOOP = ExecutionId(1), LoopId(10)


async def put(
    pool: Pool, ref_id: int, body: bytes, *, execution_id: ExecutionId = EXECUTION
) -> None:
    await pool.execute(
        "INSERT INTO noetl.result_ref (execution_id, ref_id, step, store_tier, bytes, inline)"
        " VALUES ($1, $2, 's', 'db', $3, $4)",
        execution_id,
        ref_id,
        len(body),
        body,
    )


async def test_only_what_is_stored_is_found(pool: Pool) -> None:
    await put(pool, 5, b"[]")

    found = await find(pool, EXECUTION, [RefId(5), RefId(6)])

    assert found == {RefId(5): StoredRow("db", None, "application/json", 2, None, b"[]")}


async def test_results_of_several_executions_are_found_together(pool: Pool) -> None:
    await put(pool, 5, b"[]")
    await put(pool, 5, b"{}", execution_id=ExecutionId(2))

    keys = [(EXECUTION, RefId(5)), (ExecutionId(2), RefId(5)), (EXECUTION, RefId(6))]
    found = await find_each(pool, keys)

    assert {key: row.inline for key, row in found.items()} == {keys[0]: b"[]", keys[1]: b"{}"}


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

    assert await manifest.activations(pool, EXECUTION, LOOP) == ([LOOP], 3)
    part = await manifest.part(pool, EXECUTION, LOOP, part_index=0)
    assert part is not None
    assert part.inline == b"[1,2,3]"
    assert await manifest.part(pool, EXECUTION, LOOP, part_index=1) is None
    assert await manifest.activations(pool, EXECUTION, LoopId(99)) == ([99], None)


async def test_the_pages_of_sequences_are_listed_in_order(pool: Pool) -> None:
    log = LoopLog(pool)
    first = await log.paged(None, [1], NOTHING, [2, 3])
    await log.complete(None, first, pages=3, collect="collect", merge_path="data")
    second = await log.paged(None, "open")
    keys = [(log.execution_id, first), (log.execution_id, second)]

    parts = await manifest.page_parts(pool, keys)

    assert [(part.part_index, part.size) for part in parts[keys[0]]] == [(0, 3), (2, 5)]
    assert [part.part_index for part in parts[keys[1]]] == [0]
    assert await manifest.pages(pool, keys) == {keys[0]: (("collect", "data"), 3)}
    assert await manifest.pages_bytes(pool, *keys[0]) == 8
