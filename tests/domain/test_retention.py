"""Which weeks are past retention."""

import pytest

from noetl_core.domain.partitions import WEEK_MS, partition_of, week_start_ms
from noetl_core.domain.retention import DAY_MS, is_past, kept_from_ms, week_named, week_of
from noetl_core.domain.snowflake import EPOCH_MS, first_id_at

MONDAY_MS = week_start_ms(EPOCH_MS + 100 * WEEK_MS)


@pytest.mark.parametrize("weeks", [0, 1, 52, 53, 104, 157, 400])
def test_a_week_is_found_by_its_name_and_by_any_id_of_it(weeks: int) -> None:
    start_ms = EPOCH_MS + weeks * WEEK_MS
    week = week_of(first_id_at(start_ms))

    assert week == week_of(first_id_at(start_ms + WEEK_MS) - 1)
    assert week == week_named(week.name)
    assert (f"event_{week.name}", week.lower, week.upper) == partition_of(
        "event", start_ms=start_ms
    )[1:]


def test_a_week_is_past_when_its_last_moment_is() -> None:
    week = week_of(first_id_at(MONDAY_MS))
    ripe_ms = MONDAY_MS + WEEK_MS + 30 * DAY_MS

    assert is_past(week, kept_from_ms=kept_from_ms(now_ms=ripe_ms, retention_days=30))
    assert not is_past(week, kept_from_ms=kept_from_ms(now_ms=ripe_ms - 1, retention_days=30))
