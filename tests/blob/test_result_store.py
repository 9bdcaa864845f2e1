"""Results in, results out: inline or in a tier, checked, cached, in order."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from noetl_core.blob import (
    ReferenceNotAvailableError,
    Resolved,
    ResultStore,
    ResultTooLargeError,
    document_of,
)
from noetl_core.blob.aggregates import ITEMS_AT_ONCE
from noetl_core.blob.cache import DocumentCache
from noetl_core.blob.result_store import DB_BYTES_MAX
from noetl_core.domain.envelope import INLINE_BYTES_MAX, Reference
from noetl_core.domain.ids import EventId, ExecutionId, LoopId, RefId
from noetl_core.domain.result_view import StepDocument
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Stored
from support.loop_log import NOTHING, LoopLog

EXECUTION = ExecutionId(12345)
CHILD = ExecutionId(2)
LARGE = {"text": "x" * (INLINE_BYTES_MAX + 1)}


async def record(pool: Pool, ref_id: int, stored: Stored) -> Reference:
    """What the broker's commit does with it."""
    await pool.execute(
        "INSERT INTO noetl.result_ref (execution_id, ref_id, step, store_tier, physical_uri,"
        " media_type, bytes, sha256, inline) VALUES ($1, $2, 's', $3, $4, $5, $6, $7, $8)",
        EXECUTION,
        ref_id,
        stored.tier,
        stored.uri,
        stored.media_type,
        stored.size,
        stored.sha256,
        stored.inline,
    )
    return Reference(ref_id=RefId(ref_id), type="db" if stored.tier == "db" else "object_store")


def files_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "document",
    [None, 1, "é", [1, {"a": None}], StepDocument(data=1, task="b", earlier={"a": 2}), LARGE],
)
async def test_a_document_comes_back_as_it_went_in(
    pool: Pool, tmp_path: Path, document: Any
) -> None:
    store = ResultStore(store_dir=str(tmp_path))
    reference = await record(pool, 7, await store.put(EXECUTION, "a.1#1", document))

    assert await store.get(pool, EXECUTION, reference) == document
    assert await ResultStore(store_dir=str(tmp_path)).get(pool, EXECUTION, reference) == document


async def test_a_small_result_rides_with_the_message(tmp_path: Path) -> None:
    stored = await ResultStore(store_dir=str(tmp_path)).put(EXECUTION, "a.1#1", {"a": 1})

    assert (stored.tier, stored.inline) == ("db", b'{"a":1}')
    assert stored.sha256 == hashlib.sha256(b'{"a":1}').digest()
    assert document_of(stored) == {"a": 1}
    assert files_in(tmp_path) == []


async def test_a_large_result_is_a_file_that_a_retry_overwrites(tmp_path: Path) -> None:
    store = ResultStore(store_dir=str(tmp_path))

    first = await store.put(EXECUTION, "load/users.1/17#2", LARGE)
    second = await store.put(EXECUTION, "load/users.1/17#2", {**LARGE, "more": 1})

    files = files_in(tmp_path)
    assert first.uri == second.uri
    assert first.inline is None
    assert len(files) == 1
    assert msgspec.json.decode(files[0].read_bytes())["more"] == 1


@pytest.mark.parametrize("name", ["..", "../../escape", "x" * 400, "ü" * 100, "a\x00b"])
async def test_no_name_leaves_its_directory(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    store = ResultStore(store_dir=str(root))

    await store.put(EXECUTION, name, LARGE)

    (file,) = files_in(tmp_path)
    assert file.parent == root / "45" / "12345"


async def test_without_a_directory_the_database_takes_more_but_not_everything() -> None:
    store = ResultStore()

    assert (await store.put(EXECUTION, "a", LARGE)).tier == "db"
    with pytest.raises(ResultTooLargeError, match="NOETL_STORE_DIR"):
        await store.put(EXECUTION, "a", "x" * DB_BYTES_MAX)


async def test_a_missing_or_damaged_payload_says_so(pool: Pool, tmp_path: Path) -> None:
    store = ResultStore(store_dir=str(tmp_path), cache_bytes=0)
    reference = await record(pool, 7, await store.put(EXECUTION, "a", LARGE))
    (file,) = files_in(tmp_path)

    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(ReferenceNotAvailableError, match="not those that were stored"):
        await store.get(pool, EXECUTION, reference)
    file.unlink()
    with pytest.raises(ReferenceNotAvailableError, match="cannot be read"):
        await store.get(pool, EXECUTION, reference)
    with pytest.raises(ReferenceNotAvailableError, match="not configured"):
        await ResultStore().get(pool, EXECUTION, reference)
    with pytest.raises(ReferenceNotAvailableError) as missing:
        await store.get(pool, EXECUTION, Reference(ref_id=RefId(8), type="db"))
    assert missing.value.as_tool_error().code == "REFERENCE_NOT_AVAILABLE"


async def test_a_uri_cannot_point_outside_the_tier(pool: Pool, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret").write_bytes(b"1")
    outside = Stored(tier="pvc", size=1, sha256=hashlib.sha256(b"1").digest(), uri="pvc:../secret")
    reference = await record(pool, 7, outside)

    with pytest.raises(ReferenceNotAvailableError):
        await ResultStore(store_dir=str(root)).get(pool, EXECUTION, reference)


async def test_a_loop_gives_its_results_in_order_with_gaps_for_failures(
    pool: Pool, tmp_path: Path
) -> None:
    store = ResultStore(store_dir=str(tmp_path))
    for index, document in ((3, LARGE), (0, {"n": 0}), (1, None)):
        event_id = 100 + index
        await pool.execute(
            "INSERT INTO noetl.event (execution_id, event_id, event_key, shard_id, event_type,"
            " loop_id, iter_index) VALUES ($1, $2, $3, 0, 'call.done', 10, $4)",
            EXECUTION,
            event_id,
            f"end:{index}",
            index,
        )
        if document is not None:
            await record(pool, event_id, await store.put(EXECUTION, f"a/{index}", document))
    await pool.execute(
        "INSERT INTO noetl.manifest (execution_id, manifest_id, kind, item_count, part_count)"
        " VALUES ($1, 10, 'collection', 5, 1)",
        EXECUTION,
    )

    results = await store.get(pool, EXECUTION, Reference(ref_id=RefId(10), type="eventlog"))

    assert results == [{"n": 0}, None, None, LARGE, None]


async def test_a_part_of_a_collection_is_read_once(pool: Pool) -> None:
    await pool.execute(
        "INSERT INTO noetl.manifest_part (execution_id, manifest_id, part_index, item_count,"
        " store_tier, bytes, inline) VALUES ($1, 10, 2, 2, 'db', 5, '[1,2]')",
        EXECUTION,
    )
    store = ResultStore()

    assert await store.part(pool, EXECUTION, LoopId(10), 2) == [1, 2]
    await pool.execute("DELETE FROM noetl.manifest_part")
    assert await store.part(pool, EXECUTION, LoopId(10), 2) == [1, 2]
    with pytest.raises(ReferenceNotAvailableError):
        await store.part(pool, EXECUTION, LoopId(10), 3)


def test_the_cache_forgets_what_was_not_used_and_keeps_its_bound() -> None:
    cache = DocumentCache(bytes_max=3 * 1256)
    for name in ("a", "b", "c"):
        cache.put(name, name, 1000)
    cache.get("a", None)

    cache.put("d", "d", 1000)
    cache.put("huge", "huge", 10_000)

    kept = [name for name in ("a", "b", "c", "d", "huge") if cache.get(name, None)]
    assert kept == ["a", "c", "d"]


async def test_a_reference_that_names_an_execution_is_read_there(pool: Pool) -> None:
    child = LoopLog(pool, 2)
    event_id = await child.done(None, {"of": "the child"})
    reference = Reference(ref_id=RefId(event_id), type="db", execution_id=child.execution_id)

    assert await ResultStore().get(pool, EXECUTION, reference) == {"of": "the child"}
    with pytest.raises(ReferenceNotAvailableError):
        await ResultStore().get(pool, EXECUTION, Reference(ref_id=RefId(event_id), type="db"))


@pytest.mark.parametrize(
    ("collect", "expected"),
    [("append", [1, 2, 3]), ("collect", [{"rows": [1]}, None, {"rows": [2, 3]}])],
)
async def test_pages_are_collected_by_the_rule_of_their_manifest(
    pool: Pool, collect: str, expected: list[Any]
) -> None:
    log, store = LoopLog(pool), ResultStore()
    sequence = await log.paged(None, {"rows": [1]}, NOTHING, {"rows": [2, 3]})
    reference = await log.complete(None, sequence, pages=3, collect=collect, merge_path="rows")

    assert await store.get(pool, log.execution_id, reference) == expected
    await pool.execute("DELETE FROM noetl.result_ref")
    assert await store.get(pool, log.execution_id, reference) == expected
    with pytest.raises(ReferenceNotAvailableError, match="is not stored"):
        await ResultStore().get(pool, log.execution_id, reference)


async def test_a_thousand_pages_come_in_order(pool: Pool) -> None:
    log = LoopLog(pool)
    await pool.execute(
        "INSERT INTO noetl.result_ref (execution_id, ref_id, step, store_tier, bytes, inline)"
        " SELECT 1, n, 's', 'db', 4, n::text::bytea FROM generate_series(1, 1000) AS n"
    )
    await pool.execute(
        "INSERT INTO noetl.manifest_part (execution_id, manifest_id, part_index, item_count,"
        " store_tier, bytes, ref_id)"
        " SELECT 1, 1, n - 1, 1, 'result', 4, n FROM generate_series(1, 1000) AS n"
    )
    reference = await log.complete(None, EventId(1), pages=1000)

    found = await ResultStore().get(pool, log.execution_id, reference)

    assert found == list(range(1, 1001))


async def test_pages_of_the_turn_under_way_go_over_those_that_are_stored(pool: Pool) -> None:
    log, store = LoopLog(pool), ResultStore()
    sequence = await log.paged(None, [1], [2], goes_on=True)
    fresh = {2: await store.put(log.execution_id, "a@3", [3])}
    key = (pool, log.execution_id, sequence)

    assert await store.pages(*key, fresh=fresh, rule=("append", "")) == [1, 2, 3]
    assert await store.pages(*key, fresh=fresh, rule=("replace", "")) == [3]
    with pytest.raises(ReferenceNotAvailableError, match="manifest"):
        await store.pages(*key)
    first = {0: fresh[2]}
    alone = await store.pages(pool, log.execution_id, EventId(5), fresh=first, rule=("append", ""))
    assert alone == [3]


async def test_items_of_a_loop_may_be_pages_or_results_of_children(pool: Pool) -> None:
    log, child = LoopLog(pool), LoopLog(pool, 2)
    await child.started(2)
    await child.done(1, "last")
    list_of_child = Reference(ref_id=RefId(child.loop_id), type="eventlog", execution_id=CHILD)
    whole = Reference(ref_id=RefId(await child.done(None, {"n": 1})), type="db", execution_id=CHILD)
    await log.started(8)
    await log.done(0, "plain")
    await log.complete(1, await log.paged(1, [1], [2]), pages=2)
    await log.done(2, reference=whole)
    await log.done(3, reference=list_of_child)
    await log.paged(4, ["lost"], goes_on=True)
    await log.failed(4, page=2)
    await log.complete(5, await log.paged(5, {"last": 1}), pages=1, collect="replace")
    await log.done(6, LARGE)

    results = await ResultStore().results_of_loop(pool, log.execution_id, log.loop_id)

    expected = ["plain", [1, 2], {"n": 1}, [None, "last"], None, {"last": 1}, LARGE, None]
    assert results == expected


async def test_a_loop_that_goes_on_has_the_results_of_what_it_goes_on_with(pool: Pool) -> None:
    log, store = LoopLog(pool), ResultStore()
    first = await log.started(4)
    await log.done(0, "first")
    await log.failed(1)
    await log.failed(2)
    second = await log.started(4, base=first)
    await log.done(2, "second")
    await log.failed(1)
    third = await log.started(4, base=second)
    await log.done(1, "third")

    key = (pool, log.execution_id)
    assert await store.results_of_loop(*key, third) == ["first", "third", "second", None]
    assert await store.results_of_loop(*key, first) == ["first", None, None, None]
    assert await store.undone_of_loop(*key, first) == [1, 2, 3]
    assert await store.undone_of_loop(*key, third) == [3]


async def test_what_is_fresh_goes_over_what_is_stored(pool: Pool) -> None:
    log, store = LoopLog(pool), ResultStore()
    first = await log.started(3)
    await log.done(0, "stored")
    fresh: dict[int, Stored | Resolved] = {
        1: await store.put(log.execution_id, "a/1", StepDocument(data="fresh", meta={"n": 1})),
        2: Resolved(["of a child"]),
    }
    key = (pool, log.execution_id)

    merged = await store.results_of_loop(*key, first, fresh=fresh)
    gone_on = await store.results_of_loop(*key, LoopId(99), fresh=fresh, base=first)

    assert merged == gone_on == ["stored", "fresh", ["of a child"]]
    assert await store.results_of_loop(*key, first) == ["stored", None, None]


async def test_a_cursor_gives_the_results_of_the_frames_that_had_rows(pool: Pool) -> None:
    log, store = LoopLog(pool), ResultStore()
    await log.done(1, "second", frame_rows=3)
    await log.done(0, "first", frame_rows=10)
    await log.done(3, "nothing was left")
    await log.failed(2)
    fresh = {4: Resolved("last")}
    key = (pool, log.execution_id, log.loop_id)

    assert await store.results_of_loop(*key) == ["first", "second", None]
    assert await store.results_of_loop(*key, fresh=fresh) == ["first", "second", None, "last"]
    assert await store.undone_of_loop(*key) == []


async def test_a_loop_longer_than_one_statement_reads_is_whole(pool: Pool) -> None:
    total = ITEMS_AT_ONCE + 5
    await pool.execute(
        "INSERT INTO noetl.event (execution_id, event_id, event_key, shard_id, event_type,"
        " loop_id, iter_index) SELECT 1, n + 1, 'k' || n, 0, 'call.done', 10, n"
        " FROM generate_series(0, $1::integer - 2) AS n",
        total,
    )
    await pool.execute(
        "INSERT INTO noetl.result_ref (execution_id, ref_id, step, store_tier, bytes, inline)"
        " SELECT 1, n + 1, 's', 'db', 4, n::text::bytea FROM generate_series(0, $1::integer) AS n",
        total,
    )
    await pool.execute(
        "INSERT INTO noetl.manifest (execution_id, manifest_id, kind, item_count, part_count)"
        " VALUES (1, 10, 'collection', $1, 1)",
        total,
    )

    results = await ResultStore().results_of_loop(pool, ExecutionId(1), LoopId(10))

    assert results == [*range(total - 1), None]
