"""What is past retention: whole weeks of executions, as the log is partitioned by them."""

from datetime import UTC, datetime
from typing import NamedTuple

from noetl_core.domain.partitions import WEEK_MS, partition_of, week_start_ms
from noetl_core.domain.snowflake import first_id_at, minted_at_ms

DAY_MS = 24 * 60 * 60 * 1000


class Week(NamedTuple):
    """The executions with `lower <= execution_id < upper`; `name` is that of its partitions."""

    name: str
    lower: int
    upper: int


def week_of(execution_id: int) -> Week:
    start_ms = week_start_ms(minted_at_ms(execution_id))
    name = partition_of("event", start_ms=start_ms).name.removeprefix("event_")
    # The first week began before the first id could be made.
    return Week(name, max(first_id_at(start_ms), 0), first_id_at(start_ms + WEEK_MS))


def week_named(name: str) -> Week:
    """`2026w07`, as `week_of` names it."""
    year, number = name.split("w")
    monday = datetime.fromisocalendar(int(year), int(number), 1).replace(tzinfo=UTC)
    return week_of(max(first_id_at(int(monday.timestamp()) * 1000), 0))


def kept_from_ms(*, now_ms: int, retention_days: float) -> int:
    """What ended before this moment may leave the database."""
    return now_ms - round(retention_days * DAY_MS)


def is_past(week: Week, *, kept_from_ms: int) -> bool:
    """All its executions were begun before."""
    return minted_at_ms(week.upper) <= kept_from_ms
