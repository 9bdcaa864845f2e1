"""What the projection shows: how far the shards are behind that it holds now."""

import time
from collections.abc import Iterator

import pytest
from opentelemetry.metrics import CallbackOptions

from noetl_core.domain.ids import ShardId
from noetl_projection import metrics

ONE, OTHER = ShardId(1), ShardId(2)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    metrics.say_held([])
    yield
    metrics.say_held([])


def lags() -> dict[int, float]:
    return {one.attributes["shard"]: one.value for one in metrics._lags(CallbackOptions())}  # type: ignore[index, misc]


def test_the_lag_of_a_shard_is_that_of_the_last_turn() -> None:
    metrics.say_held([ONE, OTHER])
    metrics.say_projected({ONE: 120, OTHER: 7}, events=2, parked=0)
    metrics.say_current([OTHER])

    assert lags() == {ONE: 120, OTHER: 0}


def test_a_shard_that_was_lost_is_shown_no_more() -> None:
    metrics.say_held([ONE, OTHER])
    metrics.say_projected({ONE: 120, OTHER: 7}, events=2, parked=0)

    metrics.say_held([OTHER])

    assert lags() == {OTHER: 7}


def test_the_lag_grows_while_nothing_can_be_projected(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics.say_held([ONE])
    metrics.say_current([ONE])
    now = time.monotonic()

    monkeypatch.setattr("time.monotonic", lambda: now + 5)
    metrics.say_held([ONE])  # a turn that begins, and fails

    assert lags()[ONE] >= 4900
