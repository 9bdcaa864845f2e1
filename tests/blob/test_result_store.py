"""Results in, results out: inline or in a tier, checked, cached, in order."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from noetl_core.blob import (
    ReferenceNotAvailableError,
    ResultStore,
    ResultTooLargeError,
    document_of,
)
from noetl_core.blob.cache import DocumentCache
from noetl_core.blob.result_store import DB_BYTES_MAX
from noetl_core.domain.envelope import INLINE_BYTES_MAX, Reference
from noetl_core.domain.ids import ExecutionId, LoopId, RefId
from noetl_core.domain.result_view import StepDocument
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Stored

EXECUTION = ExecutionId(12345)
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
