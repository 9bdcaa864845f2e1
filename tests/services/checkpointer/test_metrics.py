"""What the checkpointer shows: ages of the shards it knows of, as long as it leads."""

from opentelemetry.metrics import CallbackOptions

from noetl_checkpointer import metrics
from noetl_core.domain.ids import ShardId


def ages() -> dict[int, float]:
    return {one.attributes["shard"]: one.value for one in metrics._observed(CallbackOptions())}  # type: ignore[index, misc]


def test_a_quiet_shard_has_no_age_and_one_that_is_gone_is_not_shown() -> None:
    metrics.show_ages([ShardId(0), ShardId(1)], {ShardId(1): 900.0})
    assert ages() == {0: 0.0, 1: 900.0}

    metrics.show_ages([ShardId(0)], {})

    assert ages() == {0: 0.0}


def test_who_leads_no_more_shows_nothing() -> None:
    metrics.show_ages([ShardId(0)], {ShardId(0): 900.0})

    metrics.show_ages((), {})

    assert ages() == {}
