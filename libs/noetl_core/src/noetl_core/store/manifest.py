"""noetl.manifest and its parts: ordered aggregates, such as the collection of a loop."""

from noetl_core.domain.ids import ExecutionId, LoopId
from noetl_core.store.postgres import Connection, Pool
from noetl_core.store.result_ref import StoredRow

_PART = """
SELECT store_tier, physical_uri, 'application/json', bytes, sha256, inline
FROM noetl.manifest_part
WHERE execution_id = $1 AND manifest_id = $2 AND part_index = $3
"""


async def part(
    conn: Connection | Pool, execution_id: ExecutionId, manifest_id: LoopId, *, part_index: int
) -> StoredRow | None:
    row = await conn.fetchrow(_PART, execution_id, manifest_id, part_index)
    return None if row is None else StoredRow(*row)


_ITEM_COUNT = "SELECT item_count FROM noetl.manifest WHERE execution_id = $1 AND manifest_id = $2"


async def item_count(
    conn: Connection | Pool, execution_id: ExecutionId, manifest_id: LoopId
) -> int | None:
    count: int | None = await conn.fetchval(_ITEM_COUNT, execution_id, manifest_id)
    return count
