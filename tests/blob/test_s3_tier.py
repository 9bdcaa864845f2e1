"""Results in S3: stored before they are told of, found again, elsewhere while it is away."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from noetl_core.blob import ReferenceNotAvailableError, ResultStore, ResultTooLargeError
from noetl_core.blob.away import StoreAwayError
from noetl_core.blob.chain import LEFT_ALONE_SECONDS, Chain
from noetl_core.blob.s3 import S3
from noetl_core.blob.s3_tier import S3Tier
from noetl_core.domain.envelope import Reference
from noetl_core.domain.ids import ExecutionId, RefId
from noetl_core.process.config import ConfigError, StoreConfig, load_config
from noetl_core.process.stores import open_results
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Stored
from support.s3 import BUCKET, Gate, settings

EXECUTION = ExecutionId(381467627739967488)
LARGE = "x" * 100_000
MEGABYTE = 1024 * 1024


@pytest.fixture
async def tier_behind_gate(gate: Gate) -> AsyncIterator[S3Tier]:
    async with S3(settings(gate.url, timeout_seconds=30.0)) as s3:
        yield S3Tier(s3, BUCKET)


async def recorded(pool: Pool, stored: Stored) -> Reference:
    await pool.execute(
        "INSERT INTO noetl.result_ref (execution_id, ref_id, step, store_tier, physical_uri,"
        " media_type, bytes, sha256, inline) VALUES ($1, 1, 'load', $2, $3, $4, $5, $6, $7)",
        *(EXECUTION, stored.tier, stored.uri, stored.media_type, stored.size, stored.sha256),
        stored.inline,
    )
    kind = "db" if stored.uri is None else "object_store"
    return Reference(ref_id=RefId(1), type=kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "document", [{"rows": [{"n": 1}] * 10_000}, b"\x00\xff" * 50_000, "ä" * (15 * MEGABYTE)]
)
async def test_a_large_result_is_an_object_and_comes_back(
    pool: Pool, s3: S3, document: Any
) -> None:
    store = ResultStore(objects=S3Tier(s3, BUCKET))
    media_type = "application/octet-stream" if isinstance(document, bytes) else "application/json"

    stored = await store.put(EXECUTION, "load.1/17#1", document, media_type=media_type)
    reference = await recorded(pool, stored)

    assert (stored.tier, stored.inline) == ("s3", None)
    assert stored.uri == f"s3://{BUCKET}/results/88/{EXECUTION}/load.1%2F17%231"
    other_process = ResultStore(objects=S3Tier(s3, BUCKET))
    assert await other_process.get(pool, EXECUTION, reference) == document


async def test_an_attempt_that_is_repeated_overwrites_itself(s3: S3) -> None:
    store = ResultStore(objects=S3Tier(s3, BUCKET))

    first = await store.put(EXECUTION, "again.1#1", LARGE)
    second = await store.put(EXECUTION, "again.1#1", LARGE + "y")

    assert first.uri == second.uri
    assert await store.read_stored(EXECUTION, second) == LARGE + "y"
    with pytest.raises(ReferenceNotAvailableError, match="not those that were stored"):
        await store.read_stored(EXECUTION, first)


@pytest.mark.parametrize("name", ["s3", "minio", "gcs"])
async def test_the_tier_has_the_name_it_is_given_and_is_read_under_any(
    s3: S3, s3_environment: dict[str, str], name: str
) -> None:
    environ = s3_environment | {"NOETL_DEFAULT_STORE_TIER": name}
    async with open_results(load_config(StoreConfig, environ)) as store:
        stored = await store.put(EXECUTION, f"named-{name}", LARGE)

    assert stored.tier == name
    assert await ResultStore(objects=S3Tier(s3, BUCKET)).read_stored(EXECUTION, stored) == LARGE


@pytest.mark.parametrize(
    ("default", "kind", "tier"),
    [
        ("", None, "pvc"),
        ("s3", None, "s3"),
        ("db", None, "db"),
        ("pvc", "s3", "s3"),
        ("s3", "pvc", "pvc"),
        ("s3", "db", "db"),
    ],
)
async def test_a_large_result_goes_where_it_is_told_to(
    s3: S3, tmp_path: Path, default: str, kind: str | None, tier: str
) -> None:
    store = ResultStore(store_dir=str(tmp_path), objects=S3Tier(s3, BUCKET), default_tier=default)

    assert (await store.put(EXECUTION, "told", LARGE, tier=kind)).tier == tier
    assert (await store.put(EXECUTION, "told", "small", tier=kind)).tier == (kind or "db")


@pytest.mark.slow
async def test_while_s3_is_away_the_next_tier_takes_the_results(
    tier_behind_gate: S3Tier, gate: Gate, tmp_path: Path
) -> None:
    with_volume = ResultStore(store_dir=str(tmp_path), objects=tier_behind_gate, default_tier="s3")
    without = ResultStore(objects=tier_behind_gate)
    assert (await without.put(EXECUTION, "a", LARGE)).tier == "s3"
    gate.spoil("shut")

    for store, tier in ((with_volume, "pvc"), (without, "db")):
        stored = await store.put(EXECUTION, "b", LARGE)

        assert stored.tier == tier
        assert await store.read_stored(EXECUTION, stored) == LARGE


@pytest.mark.slow
async def test_what_nobody_takes_while_s3_is_away_may_be_stored_later(
    tier_behind_gate: S3Tier, gate: Gate
) -> None:
    store = ResultStore(objects=tier_behind_gate)
    too_large_for_the_database = "x" * (17 * MEGABYTE)
    gate.spoil("shut")

    for _ in range(2):  # the second time nobody is asked
        with pytest.raises(StoreAwayError, match="could not put"):
            await store.put(EXECUTION, "a", too_large_for_the_database)
    with pytest.raises(StoreAwayError):
        await store.put(EXECUTION, "a", LARGE, tier="s3")  # it must go there
    with pytest.raises(ResultTooLargeError):
        await store.put(EXECUTION, "a", too_large_for_the_database, tier="db")


async def test_a_tier_that_is_away_is_left_alone_for_a_while(
    tier_behind_gate: S3Tier, gate: Gate
) -> None:
    now = 100.0
    chain = Chain([tier_behind_gate], clock=lambda: now)
    await gate.become("failing")
    assert await chain.put(EXECUTION, "a", b"x") is None
    await gate.become("open")
    asked = gate.requests

    assert await chain.put(EXECUTION, "a", b"x") is None
    assert gate.requests == asked
    now += LEFT_ALONE_SECONDS + 1
    kept = await chain.put(EXECUTION, "a", b"x")

    assert kept is not None
    assert kept.tier == "s3"


async def test_a_read_while_s3_is_away_says_nothing_about_the_result(
    tier_behind_gate: S3Tier, gate: Gate
) -> None:
    store = ResultStore(objects=tier_behind_gate)
    stored = await store.put(EXECUTION, "a", LARGE)
    gate.spoil("shut")

    with pytest.raises(StoreAwayError):
        await store.read_stored(EXECUTION, stored)
    await gate.become("open")

    assert await store.read_stored(EXECUTION, stored) == LARGE


@pytest.mark.parametrize(
    "uri",
    [
        f"s3://{BUCKET}/results/05/5/gone",
        f"s3://{BUCKET}/archive/secret",
        "s3://another/results/05/5/a",
        f"s3://{BUCKET}/",
        "pvc:05/5/a",
    ],
)
async def test_only_results_of_our_bucket_are_read(s3: S3, uri: str) -> None:
    await s3.put(BUCKET, "archive/secret", b"1")
    await s3.put("another", "results/05/5/a", b"1")
    stored = Stored(tier="s3", size=1, sha256=hashlib.sha256(b"1").digest(), uri=uri)

    with pytest.raises(ReferenceNotAvailableError, match="cannot be read"):
        await ResultStore(objects=S3Tier(s3, BUCKET)).read_stored(EXECUTION, stored)


@pytest.mark.parametrize(
    ("tier", "needed"),
    [("pvc", "NOETL_STORE_DIR"), ("minio", "NOETL_S3_BUCKET"), ("gcs", "NOETL_S3_BUCKET")],
)
def test_a_default_tier_that_cannot_be_is_refused_at_the_start(tier: str, needed: str) -> None:
    with pytest.raises(ConfigError, match=f"NOETL_DEFAULT_STORE_TIER='{tier}' needs {needed}"):
        load_config(StoreConfig, {"NOETL_DEFAULT_STORE_TIER": tier})
