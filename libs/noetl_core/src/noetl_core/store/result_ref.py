"""noetl.result_ref: where each result is. The broker's commit writes a row with its event."""

from collections.abc import Sequence
from typing import NamedTuple

from noetl_core.domain.ids import ExecutionId, LoopId, RefId
from noetl_core.store.postgres import Connection, Pool


class StoredRow(NamedTuple):
    """A payload, inline or at a place of its tier."""

    tier: str
    uri: str | None
    media_type: str
    size: int
    sha256: bytes | None
    inline: bytes | None


_FIND = """
SELECT ref_id, store_tier, physical_uri, media_type, bytes, sha256, inline
FROM noetl.result_ref
WHERE execution_id = $1 AND ref_id = ANY ($2::bigint[])
"""


async def find(
    conn: Connection | Pool, execution_id: ExecutionId, ref_ids: Sequence[RefId]
) -> dict[RefId, StoredRow]:
    """The rows that are there, by id."""
    rows = await conn.fetch(_FIND, execution_id, ref_ids)
    return {RefId(row[0]): StoredRow(*row[1:]) for row in rows}


class LoopResult(NamedTuple):
    iter_index: int
    row: StoredRow | None
    """None for an iteration that returned nothing."""


_OF_LOOP = """
SELECT e.iter_index, r.store_tier, r.physical_uri, r.media_type, r.bytes, r.sha256, r.inline
FROM noetl.event e
LEFT JOIN noetl.result_ref r ON r.execution_id = e.execution_id AND r.ref_id = e.event_id
WHERE e.execution_id = $1 AND e.loop_id = $2 AND e.event_type = 'call.done'
ORDER BY e.iter_index
"""


async def of_loop(
    conn: Connection | Pool, execution_id: ExecutionId, loop_id: LoopId
) -> list[LoopResult]:
    """What the successful iterations returned, in order; failed ones are left out."""
    rows = await conn.fetch(_OF_LOOP, execution_id, loop_id)
    return [LoopResult(row[0], None if row[1] is None else StoredRow(*row[1:])) for row in rows]
