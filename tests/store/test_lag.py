"""How far a shard's projection is behind: the age of what it has not shown, at this moment."""

import pytest

from noetl_core.domain.ids import ExecutionId, ShardId
from noetl_core.domain.sharding import shard_of
from noetl_core.store import topology, waiting
from noetl_core.store.postgres import Pool
from services.checkpointer.test_commit_epoch import append, make_older, scanned

EXECUTION = ExecutionId(1)
SHARD = shard_of(EXECUTION, shard_count=16)
OTHER = ShardId((SHARD + 1) % 16)


async def project_to(pool: Pool, event_id: int) -> None:
    """As by a batch that was slow at the time."""
    await pool.execute(
        "INSERT INTO noetl.projection_checkpoint (shard_id, last_projected_event_id, lag_ms)"
        " VALUES ($1, $2, 60000) ON CONFLICT (shard_id) DO UPDATE"
        " SET last_projected_event_id = excluded.last_projected_event_id",
        SHARD,
        event_id,
    )


async def lags(pool: Pool) -> dict[tuple[str, int], int | None]:
    rows = await topology.standing(pool)
    return {(row["role"], row["shard_id"]): row["lag_ms"] for row in rows}


async def test_a_shard_that_is_idle_has_no_lag_however_slow_its_last_batch_was(pool: Pool) -> None:
    await append(pool, 5, shard=SHARD)
    await project_to(pool, 5)

    found = await lags(pool)

    assert found["projection", SHARD] == found["projection", OTHER] == 0
    assert found["broker", SHARD] is None
    assert (await waiting.surroundings(pool, EXECUTION)).lag_ms == 0


async def test_the_lag_is_the_age_of_the_first_event_that_is_not_projected(pool: Pool) -> None:
    for event_id, seconds in ((5, 900.0), (6, 300.0), (7, 1.0)):
        await append(pool, event_id, shard=SHARD)
        await make_older(pool, event_id, seconds)
    await project_to(pool, 5)

    found = await lags(pool)

    assert found["projection", SHARD] == pytest.approx(300_000, abs=5000)
    assert found["projection", OTHER] == 0
    around = await waiting.surroundings(pool, EXECUTION)
    assert around.lag_ms == pytest.approx(300_000, abs=5000)


async def test_a_shard_that_was_never_projected_is_behind_by_its_first_event(pool: Pool) -> None:
    await append(pool, 5, shard=SHARD)
    await make_older(pool, 5, 300)

    assert (await lags(pool))["projection", SHARD] == pytest.approx(300_000, abs=5000)


async def test_to_know_the_lags_one_event_of_each_shard_is_read(pool: Pool) -> None:
    await pool.execute(
        "INSERT INTO noetl.event (execution_id, event_id, event_key, shard_id, event_type)"
        " SELECT i, i, 'k', i % 16, 'step.enter' FROM generate_series(1, 20000) AS i"
    )
    await pool.execute("ANALYZE noetl.event")

    everywhere = await scanned(pool, topology._STANDING)
    here = await scanned(pool, waiting._SURROUNDINGS, EXECUTION)

    assert sum(rows for name, rows in everywhere.items() if name.startswith("event")) == 16
    assert sum(rows for name, rows in here.items() if name.startswith("event")) == 1
