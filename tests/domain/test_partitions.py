"""Which dated partitions exist, by values alone."""

from datetime import UTC, datetime

import pytest

from noetl_core.domain.partitions import (
    PARTITIONED_TABLES,
    WEEK_MS,
    partition_of,
    partitions_ahead,
    week_start_ms,
)
from noetl_core.domain.snowflake import Snowflake, first_id_at


def ms(*date: int) -> int:
    return int(datetime(*date, tzinfo=UTC).timestamp() * 1000)  # type: ignore[arg-type,misc]


@pytest.mark.parametrize(
    ("moment", "monday"),
    [
        (ms(2026, 11, 16), ms(2026, 11, 16)),
        (ms(2026, 11, 18, 8, 30), ms(2026, 11, 16)),
        (ms(2026, 11, 22, 23, 59, 59), ms(2026, 11, 16)),
        (ms(2024, 1, 1), ms(2024, 1, 1)),
    ],
)
def test_a_week_starts_on_monday_at_midnight(moment: int, monday: int) -> None:
    assert week_start_ms(moment) == monday


def test_partitions_follow_each_other_without_gap_or_overlap() -> None:
    made = [p for p in partitions_ahead(now_ms=ms(2026, 12, 20), weeks=5) if p.table == "event"]

    assert len(made) == 6
    assert all(p.lower < p.upper for p in made)
    assert [p.upper for p in made[:-1]] == [p.lower for p in made[1:]]


def test_every_partitioned_table_gets_the_same_ranges() -> None:
    made = partitions_ahead(now_ms=ms(2026, 11, 18), weeks=2)

    ranges = {t: [(p.lower, p.upper) for p in made if p.table == t] for t in PARTITIONED_TABLES}
    assert ranges["event"] == ranges["result_ref"]
    assert len(ranges["event"]) == 3


def test_an_id_minted_now_falls_into_the_first_partition() -> None:
    now_ms = ms(2026, 11, 18, 12)
    first = partitions_ahead(now_ms=now_ms, weeks=1)[0]

    assert first.lower <= Snowflake(1023, lambda: now_ms).mint() < first.upper


def test_the_last_millisecond_of_a_week_is_not_in_the_next() -> None:
    start = ms(2026, 11, 16)
    last_id = Snowflake(1023, lambda: start + WEEK_MS - 1).mint()

    assert last_id < partition_of("event", start_ms=start).upper == first_id_at(start + WEEK_MS)


def test_weeks_at_the_turn_of_a_year_have_different_names() -> None:
    names = [p.name for p in partitions_ahead(now_ms=ms(2026, 12, 21), weeks=4)]

    assert len(set(names)) == len(names)
    assert "event_2026w53" in names
    assert "event_2027w01" in names
