"""The dated partitions of noetl.event and noetl.result_ref, made by noetl.ensure_partition()."""

from typing import Literal

from noetl_core.domain.partitions import Partition
from noetl_core.store.postgres import Connection, Pool

Ensured = Literal["created", "exists", "occupied", "busy"]

_ENSURE = "SELECT noetl.ensure_partition($1, $2, $3, $4)"


async def ensure(conn: Connection | Pool, partition: Partition) -> Ensured:
    """Make the partition unless it is there.

    `occupied`: the DEFAULT partition holds rows of the range, which stay there. `busy`: someone
    held the DEFAULT partition for too long; ask again later.
    """
    outcome: Ensured = await conn.fetchval(_ENSURE, *partition)
    return outcome


_COUNT = """
SELECT count(*) FROM pg_catalog.pg_inherits WHERE inhparent = 'noetl.event'::regclass
"""


async def count(conn: Connection | Pool) -> int:
    """How many partitions the log has, the DEFAULT one among them."""
    return int(await conn.fetchval(_COUNT))
