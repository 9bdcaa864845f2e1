"""What the projection shows: how far the shards are behind that it holds now."""

import time
from collections.abc import Iterator

import pytest
from opentelemetry.metrics import CallbackOptions

from noetl_core.domain.ids import ShardId
from noetl_core.process.membership import Member
from noetl_core.process.ownership import ShardOwner
from noetl_core.store.postgres import Pool
from noetl_core.store.runtime import Registration
from noetl_projection import metrics
from noetl_projection.memory import Memory
from noetl_projection.project import project
from support.clock import FakeClock

ONE, OTHER = ShardId(1), ShardId(2)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    metrics.say_claimed([])
    yield
    metrics.say_claimed([])


def lags() -> dict[int, float]:
    return {one.attributes["shard"]: one.value for one in metrics._lags(CallbackOptions())}  # type: ignore[index, misc]


def test_the_lag_of_a_shard_is_that_of_the_last_turn() -> None:
    metrics.say_claimed([ONE, OTHER])
    metrics.say_projected({ONE: 120, OTHER: 7}, events=2, parked=0)
    metrics.say_current([OTHER])

    assert lags() == {ONE: 120, OTHER: 0}


def test_a_shard_that_was_lost_is_shown_no_more() -> None:
    metrics.say_claimed([ONE, OTHER])
    metrics.say_projected({ONE: 120, OTHER: 7}, events=2, parked=0)

    metrics.say_claimed([OTHER])

    assert lags() == {OTHER: 7}


def test_the_lag_grows_while_nothing_can_be_projected(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics.say_claimed([ONE])
    metrics.say_current([ONE])
    now = time.monotonic()

    monkeypatch.setattr("time.monotonic", lambda: now + 5)
    metrics.say_claimed([ONE])  # a turn that begins, and fails

    assert lags()[ONE] >= 4900


async def test_the_lag_is_shown_and_grows_when_the_lease_lapses_until_the_shards_are_lost(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an outage of Postgres: nobody can renew, and nobody else can project either."""
    clock, memory = FakeClock(), Memory(executions_max=10)
    member = Member(pool, Registration(name="a", kind="projection"))
    await member.heartbeat()
    owner = ShardOwner(pool, member, role="projection", lease_seconds=30, clock=clock)
    await owner.keep()
    await project(pool, owner, memory, batch_size=10)
    assert len(lags()) == 16
    now = time.monotonic()

    clock.advance(30)
    await project(pool, owner, memory, batch_size=10)

    assert len(owner.held()) == 0
    with monkeypatch.context() as later:
        later.setattr("time.monotonic", lambda: now + 30)
        assert len(lags()) == 16
        assert min(lags().values()) >= 29_000
    await pool.execute("UPDATE noetl.execution_shard SET owner_runtime_id = 7, epoch = epoch + 1")
    await owner.keep()
    await project(pool, owner, memory, batch_size=10)
    assert lags() == {}
