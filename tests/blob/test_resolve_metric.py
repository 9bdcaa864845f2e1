"""Whatever is read through a reference is measured."""

from typing import Any

import pytest

from noetl_core.blob import ResultStore
from noetl_core.domain.envelope import Reference
from noetl_core.domain.ids import RefId
from noetl_core.store.postgres import Pool
from support.loop_log import LoopLog


class Recorded:
    def __init__(self) -> None:
        self.tiers: list[Any] = []

    def record(self, milliseconds: float, labels: dict[str, Any]) -> None:
        assert milliseconds >= 0
        self.tiers.append(labels["tier"])


async def test_a_document_a_loop_pages_and_several_at_once_are_each_a_resolve(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded()
    monkeypatch.setattr("noetl_core.blob.result_store.RESOLVE_MS", recorded)
    log, store = LoopLog(pool), ResultStore()
    one = Reference(ref_id=RefId(await log.done(None, {"n": 1})), type="db")
    sequence = await log.paged(None, {"rows": [1]}, {"rows": [2]})
    pages = await log.complete(None, sequence, pages=2, collect="append", merge_path="rows")
    await pool.execute(
        "INSERT INTO noetl.manifest (execution_id, manifest_id, kind, item_count, part_count)"
        " VALUES ($1, 10, 'collection', 0, 0)",
        log.execution_id,
    )
    loop = Reference(ref_id=RefId(10), type="eventlog")

    for reference in (one, one, pages, loop):
        await store.get(pool, log.execution_id, reference)
    await store.values(pool, log.execution_id, [one, pages])

    assert recorded.tiers == ["db", "cache", "pages", "eventlog", "many"]
