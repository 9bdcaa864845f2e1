"""Results with a time to live, and keys of old requests, go when their time is over."""

import asyncio
import hashlib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from noetl_compactor.config import CompactorConfig
from noetl_compactor.expire import DELETES_AT_ONCE, Backlog, expire, forget_keys
from noetl_compactor.main import start
from noetl_core.blob import ReferenceNotAvailableError, ResultStore
from noetl_core.blob.file_tier import FileTier
from noetl_core.blob.s3 import S3
from noetl_core.blob.s3_tier import S3Tier
from noetl_core.blob.tier import Tier
from noetl_core.domain.envelope import Reference
from noetl_core.domain.ids import ExecutionId, RefId
from noetl_core.process.service import Service, serving
from noetl_core.store.postgres import Pool
from support.s3 import BUCKET, Gate, settings

ONE = ExecutionId(5)
LATER = timedelta(hours=1)

_RESULT = """
INSERT INTO noetl.result_ref (
    execution_id, ref_id, step, store_tier, physical_uri, bytes, sha256, inline, expires_at
)
VALUES ($1, $2, 'load', $3, $4, $5, $6, $7, $8)
"""


async def a_result(
    pool: Pool, ref_id: int, *, uri: str | None = None, lives_for: timedelta | None
) -> Reference:
    body = b'{"a": 1}'
    await pool.execute(
        _RESULT,
        *(ONE, ref_id, "db" if uri is None else uri.split(":")[0], uri, len(body)),
        hashlib.sha256(body).digest(),
        body if uri is None else None,
        None if lives_for is None else datetime.now(UTC) + lives_for,
    )
    return Reference(ref_id=RefId(ref_id), type="db" if uri is None else "object_store")


async def test_an_expired_result_is_removed_and_its_reader_is_told(
    pool: Pool, compactor_pool: Pool, tmp_path: Path
) -> None:
    tier = FileTier(tmp_path)
    uri = await tier.put(ONE, "load.1#1", b'{"a": 1}')
    inline = await a_result(pool, 1, lives_for=-LATER)
    filed = await a_result(pool, 2, uri=uri, lives_for=-LATER)

    removed = await expire(compactor_pool, {"pvc": tier}, Backlog())

    assert removed == 2
    assert not tier.path(uri).exists()
    assert await pool.fetchval("SELECT inline FROM noetl.result_ref WHERE ref_id = 1") == b""
    for reference in (inline, filed):
        with pytest.raises(ReferenceNotAvailableError, match="expired at"):
            await ResultStore(store_dir=str(tmp_path)).get(pool, ONE, reference)
    assert await expire(compactor_pool, {"pvc": tier}, Backlog()) == 0


async def test_a_result_is_gone_for_readers_before_it_is_removed(pool: Pool) -> None:
    reference = await a_result(pool, 1, lives_for=-LATER)

    with pytest.raises(ReferenceNotAvailableError, match="expired at"):
        await ResultStore().get(pool, ONE, reference)


async def test_results_whose_time_is_not_over_stay(pool: Pool, compactor_pool: Pool) -> None:
    living = await a_result(pool, 1, lives_for=LATER)
    endless = await a_result(pool, 2, lives_for=None)

    assert await expire(compactor_pool, {}, Backlog()) == 0

    for reference in (living, endless):
        assert await ResultStore().get(pool, ONE, reference) == {"a": 1}


async def test_a_turn_that_died_after_it_removed_the_file_is_finished_by_the_next(
    pool: Pool, compactor_pool: Pool, tmp_path: Path
) -> None:
    tier = FileTier(tmp_path)
    await a_result(pool, 1, uri="pvc:05/5/gone", lives_for=-LATER)

    assert await expire(compactor_pool, {"pvc": tier}, Backlog()) == 1


async def test_a_result_in_a_tier_that_is_not_configured_stays(
    pool: Pool, compactor_pool: Pool
) -> None:
    await a_result(pool, 1, uri="pvc:05/5/elsewhere", lives_for=-LATER)

    assert await expire(compactor_pool, {}, Backlog()) == 0
    assert (
        await pool.fetchval("SELECT count(*) FROM noetl.result_ref WHERE removed_at IS NULL") == 1
    )


async def test_an_expired_result_in_s3_loses_its_object(
    pool: Pool, compactor_pool: Pool, s3: S3
) -> None:
    tier = S3Tier(s3, BUCKET)
    uri = await tier.put(ONE, "expired.1#1", b'{"a": 1}')
    await a_result(pool, 1, uri=uri, lives_for=-LATER)
    living = await a_result(pool, 2, uri=await tier.put(ONE, "b", b'{"a": 1}'), lives_for=LATER)

    assert await expire(compactor_pool, {"s3": tier}, Backlog()) == 1

    with pytest.raises(FileNotFoundError):
        await tier.get(uri)
    assert await ResultStore(objects=tier).get(pool, ONE, living) == {"a": 1}


async def test_while_s3_is_away_its_results_stay_and_the_others_go(
    pool: Pool, compactor_pool: Pool, gate: Gate
) -> None:
    async with S3(settings(gate.url, timeout_seconds=10.0)) as s3:
        tier = S3Tier(s3, BUCKET)
        uris = [await tier.put(ONE, f"away.{n}", b'{"a": 1}') for n in range(3)]
        for number, uri in enumerate(uris):
            await a_result(pool, number, uri=uri, lives_for=-2 * LATER)
        await a_result(pool, 9, lives_for=-LATER)
        gate.spoil("shut")

        assert await expire(compactor_pool, {"s3": tier}, Backlog()) == 1
        await gate.become("open")
        assert await expire(compactor_pool, {"s3": tier}, Backlog()) == 3


async def test_a_row_that_names_what_is_not_ours_stops_nobody(
    pool: Pool, compactor_pool: Pool, s3: S3, tmp_path: Path
) -> None:
    await s3.put(BUCKET, "archive/x", b"1")
    for number, uri in enumerate((f"s3://{BUCKET}/archive/x", "pvc:../../etc/passwd")):
        await a_result(pool, number, uri=uri, lives_for=-LATER)
    tiers: dict[str, Tier] = {"s3": S3Tier(s3, BUCKET), "pvc": FileTier(tmp_path)}

    assert await expire(compactor_pool, tiers, Backlog()) == 2
    assert await s3.names(BUCKET, "archive/x") == ["archive/x"]


async def test_results_of_other_tiers_and_files_that_stay_hold_nobody_up(
    pool: Pool, compactor_pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("noetl_compactor.expire.EXPIRED_AT_ONCE", 3)
    tier = FileTier(tmp_path)
    for number in range(4):
        await a_result(pool, number, uri=f"pvc:05/5/in-the-way/{number}", lives_for=-3 * LATER)
        # A directory cannot be removed as a file.
        tier.path(f"pvc:05/5/in-the-way/{number}").mkdir(parents=True)
    await pool.execute("UPDATE noetl.result_ref SET store_tier = 's3' WHERE ref_id IN (0, 1)")
    for number in range(10, 14):
        await a_result(pool, number, lives_for=-LATER)

    assert await expire(compactor_pool, {"pvc": tier}, Backlog()) == 4

    left = await pool.fetch("SELECT ref_id FROM noetl.result_ref WHERE removed_at IS NULL")
    assert sorted(row["ref_id"] for row in left) == [0, 1, 2, 3]


class CountingTier(FileTier):
    """Counts how many payloads are being removed at the same time."""

    under_way = 0
    most = 0

    async def delete(self, uri: str) -> None:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await super().delete(uri)
        self.under_way -= 1


async def test_as_many_payloads_as_are_allowed_are_removed_at_the_same_time(
    pool: Pool, compactor_pool: Pool, tmp_path: Path
) -> None:
    tier = CountingTier(tmp_path)
    uris = [await tier.put(ONE, f"load.1/{number}", b"1") for number in range(40)]
    for number, uri in enumerate(uris):
        await a_result(pool, number, uri=uri, lives_for=-LATER)

    assert await expire(compactor_pool, {"pvc": tier}, Backlog()) == 40

    assert tier.most == DELETES_AT_ONCE
    assert not any(tier.path(uri).exists() for uri in uris)


async def test_the_next_turn_goes_on_behind_what_could_not_be_removed(
    pool: Pool, compactor_pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("noetl_compactor.expire.EXPIRED_AT_ONCE", 3)
    monkeypatch.setattr("noetl_compactor.expire.BATCHES_MAX", 1)
    tier = FileTier(tmp_path)
    for number in range(4):
        await a_result(pool, number, uri=f"pvc:05/5/in-the-way/{number}", lives_for=-3 * LATER)
        tier.path(f"pvc:05/5/in-the-way/{number}").mkdir(parents=True)
    for number in range(10, 14):
        await a_result(pool, number, lives_for=-LATER)
    backlog = Backlog()

    turns = []
    for _ in range(4):
        removed = await expire(compactor_pool, {"pvc": tier}, backlog)
        turns.append((removed, backlog.is_left))

    # The last one begins again with what is in the way: it may be mended by now.
    assert turns == [(0, True), (2, True), (2, False), (0, True)]


async def test_a_backlog_does_not_wait_for_the_next_interval(
    pool: Pool, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("noetl_compactor.expire.EXPIRED_AT_ONCE", 3)
    monkeypatch.setattr("noetl_compactor.expire.BATCHES_MAX", 1)
    for number in range(10):
        await a_result(pool, number, lives_for=-LATER)
    config = CompactorConfig(postgres_dsn=database, compactor_interval_seconds=3600)

    async with serving(Service("compactor", config), start), asyncio.timeout(60):
        while await pool.fetchval(  # noqa: ASYNC110 - the service acts
            "SELECT count(*) FROM noetl.result_ref WHERE removed_at IS NULL"
        ):
            await asyncio.sleep(0.05)


async def test_what_has_not_expired_cannot_be_removed(pool: Pool, compactor_pool: Pool) -> None:
    await a_result(pool, 1, lives_for=LATER)

    assert await compactor_pool.fetchval("SELECT noetl.remove_expired('{5}', '{1}')") == 0


async def test_only_old_keys_are_forgotten(pool: Pool, compactor_pool: Pool) -> None:
    for key, age in (("old", timedelta(days=40)), ("young", timedelta(days=2))):
        await pool.execute(
            "INSERT INTO noetl.idempotency (idempotency_key, fingerprint, execution_id, created_at)"
            " VALUES ($1, '', 1, now() - $2::interval)",
            key,
            age,
        )

    removed = await forget_keys(compactor_pool, before=datetime.now(UTC) - timedelta(days=30))

    assert removed == 1
    assert await pool.fetchval("SELECT idempotency_key FROM noetl.idempotency") == "young"
