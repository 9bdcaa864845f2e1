"""noetl.manifest and its parts: ordered aggregates, such as the collection of a loop.

A loop that a retry of its execution entered again is another activation with a manifest of its
own; `base` in its `meta` names the activation before. The pages of a sequence of calls are results
of their own: the parts of their manifest only name them.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from noetl_core.domain.ids import EventId, ExecutionId, LoopId, RefId
from noetl_core.domain.pages import PageRule
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


class Activations(NamedTuple):
    """A loop with the activations that it goes on with, and the number of all its items."""

    loop_ids: list[LoopId]
    total: int | None
    """None for a cursor: it has no collection, hence no manifest."""


_ACTIVATIONS = """
WITH RECURSIVE activation AS (
    SELECT manifest_id, item_count, (meta ->> 'base')::bigint AS base
    FROM noetl.manifest
    WHERE execution_id = $1 AND manifest_id = $2
    UNION ALL
    SELECT m.manifest_id, activation.item_count, (m.meta ->> 'base')::bigint
    FROM activation
    JOIN noetl.manifest m ON m.execution_id = $1 AND m.manifest_id = activation.base
)
SELECT manifest_id, item_count FROM activation
"""


async def activations(
    conn: Connection | Pool, execution_id: ExecutionId, loop_id: LoopId
) -> Activations:
    rows = await conn.fetch(_ACTIVATIONS, execution_id, loop_id)
    if not rows:
        return Activations([loop_id], None)
    return Activations([LoopId(row[0]) for row in rows], int(rows[0][1]))


SequenceKey = tuple[ExecutionId, EventId]
"""A sequence of calls: the execution, and the id of its manifest."""


class Pages(NamedTuple):
    rule: PageRule
    page_count: int


_PAGES = """
SELECT m.execution_id, m.manifest_id, m.meta ->> 'collect', m.meta ->> 'merge_path', m.part_count
FROM unnest($1::bigint[], $2::bigint[]) AS wanted (execution_id, manifest_id)
JOIN noetl.manifest m USING (execution_id, manifest_id)
"""


async def pages(
    conn: Connection | Pool, sequences: Sequence[SequenceKey]
) -> dict[SequenceKey, Pages]:
    """How the pages of these sequences are collected. One that has not ended is left out."""
    rows = await conn.fetch(_PAGES, *_columns(sequences))
    return {
        (ExecutionId(row[0]), EventId(row[1])): Pages(
            PageRule(row[2] or "append", row[3] or ""), row[4]
        )
        for row in rows
    }


class PagePart(NamedTuple):
    part_index: int
    ref_id: RefId
    size: int


_PAGE_PARTS = """
SELECT p.execution_id, p.manifest_id, p.part_index, p.ref_id, p.bytes
FROM unnest($1::bigint[], $2::bigint[]) AS wanted (execution_id, manifest_id)
JOIN noetl.manifest_part p USING (execution_id, manifest_id)
WHERE p.ref_id IS NOT NULL
ORDER BY p.execution_id, p.manifest_id, p.part_index
"""


async def page_parts(
    conn: Connection | Pool, sequences: Sequence[SequenceKey]
) -> dict[SequenceKey, list[PagePart]]:
    """The pages that returned something, in order; no payload is read."""
    rows = await conn.fetch(_PAGE_PARTS, *_columns(sequences))
    return {
        (ExecutionId(key[0]), EventId(key[1])): [PagePart(*row[2:]) for row in own]
        for key, own in groupby(rows, key=lambda row: (row[0], row[1]))
    }


_PAGES_BYTES = """
SELECT coalesce(sum(bytes), 0)::bigint
FROM noetl.manifest_part
WHERE execution_id = $1 AND manifest_id = $2
"""


async def pages_bytes(conn: Connection | Pool, execution_id: ExecutionId, sequence: EventId) -> int:
    """How much the pages weigh together."""
    return int(await conn.fetchval(_PAGES_BYTES, execution_id, sequence))


_PAGES_BYTES_OF = """
SELECT coalesce(sum(p.bytes), 0)::bigint
FROM unnest($1::bigint[], $2::bigint[]) AS wanted (execution_id, manifest_id)
JOIN noetl.manifest_part p USING (execution_id, manifest_id)
"""


async def pages_bytes_of(conn: Connection | Pool, sequences: Sequence[SequenceKey]) -> int:
    """How much the pages of all of them weigh together; one that is named twice counts twice."""
    if not sequences:
        return 0
    return int(await conn.fetchval(_PAGES_BYTES_OF, *_columns(sequences)))


def _columns(pairs: Sequence[SequenceKey]) -> tuple[list[int], list[int]]:
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]
