"""Which dated partitions the log and the results need. One holds the executions of a week.

`noetl.event` and `noetl.result_ref` are ranges of `execution_id`, and an id starts with the time it
was made, so a range of ids is a range of dates. Weeks begin on Monday, 00:00 UTC, and are named as
ISO 8601 counts them. With thirty days of retention about ten partitions exist at a time: few enough
that a read of a shard's tail, which must look into each, stays cheap.
"""

from datetime import UTC, datetime
from typing import NamedTuple

from noetl_core.domain.snowflake import first_id_at

PARTITIONED_TABLES = ("event", "result_ref")
WEEK_MS = 7 * 24 * 60 * 60 * 1000

# 1970 began on a Thursday: the first Monday is four days later.
_MONDAY_MS = 4 * 24 * 60 * 60 * 1000


class Partition(NamedTuple):
    """Executions with `lower <= execution_id < upper` belong to `table`'s partition `name`."""

    table: str
    name: str
    lower: int
    upper: int


def partitions_ahead(*, now_ms: int, weeks: int) -> tuple[Partition, ...]:
    """This week and the `weeks` that follow, for each partitioned table."""
    first = week_start_ms(now_ms)
    return tuple(
        partition_of(table, start_ms=first + offset * WEEK_MS)
        for offset in range(weeks + 1)
        for table in PARTITIONED_TABLES
    )


def partition_of(table: str, *, start_ms: int) -> Partition:
    assert table in PARTITIONED_TABLES, table
    year, week, weekday = datetime.fromtimestamp(start_ms / 1000, UTC).isocalendar()
    assert weekday == 1, (start_ms, weekday)
    return Partition(
        table=table,
        name=f"{table}_{year}w{week:02}",
        lower=first_id_at(start_ms),
        upper=first_id_at(start_ms + WEEK_MS),
    )


def week_start_ms(unix_ms: int) -> int:
    """Monday, 00:00 UTC, of the week that holds this moment."""
    return unix_ms - (unix_ms - _MONDAY_MS) % WEEK_MS
