"""noetl.result_ref: where each result is. The broker's commit writes a row with its event."""

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from noetl_core.domain.ids import ExecutionId, RefId
from noetl_core.store.postgres import Connection, Pool


class StoredRow(NamedTuple):
    """A payload, inline or at a place of its tier."""

    tier: str
    uri: str | None
    media_type: str
    size: int
    sha256: bytes | None
    inline: bytes | None
    expires_at: datetime | None = None
    is_removed: bool = False
    """Its payload is gone: its time was over by the clock of the database, which may be ahead."""

    @property
    def is_expired(self) -> bool:
        """Its time is over, whether or not its payload has been removed by now."""
        is_late = self.expires_at is not None and self.expires_at <= datetime.now(UTC)
        return is_late or self.is_removed


_FIND = """
SELECT ref_id, store_tier, physical_uri, media_type, bytes, sha256, inline, expires_at,
       removed_at IS NOT NULL
FROM noetl.result_ref
WHERE execution_id = $1 AND ref_id = ANY ($2::bigint[])
"""


async def find(
    conn: Connection | Pool, execution_id: ExecutionId, ref_ids: Sequence[RefId]
) -> dict[RefId, StoredRow]:
    """The rows that are there, by id."""
    rows = await conn.fetch(_FIND, execution_id, ref_ids)
    return {RefId(row[0]): StoredRow(*row[1:]) for row in rows}


ResultKey = tuple[ExecutionId, RefId]

_FIND_EACH = """
SELECT r.execution_id, r.ref_id, r.store_tier, r.physical_uri, r.media_type, r.bytes, r.sha256,
       r.inline, r.expires_at, r.removed_at IS NOT NULL
FROM unnest($1::bigint[], $2::bigint[]) AS wanted (execution_id, ref_id)
JOIN noetl.result_ref r USING (execution_id, ref_id)
"""


async def find_each(
    conn: Connection | Pool, keys: Sequence[ResultKey]
) -> dict[ResultKey, StoredRow]:
    """The rows that are there, of any executions."""
    rows = await conn.fetch(_FIND_EACH, [key[0] for key in keys], [key[1] for key in keys])
    return {(ExecutionId(row[0]), RefId(row[1])): StoredRow(*row[2:]) for row in rows}


class Expired(NamedTuple):
    """A result whose payload is still there although its time is over."""

    expires_at: datetime
    execution_id: ExecutionId
    ref_id: RefId
    tier: str
    uri: str | None


_EXPIRED = """
SELECT expires_at, execution_id, ref_id, store_tier, physical_uri
FROM noetl.result_ref
WHERE expires_at <= now() AND expires_at IS NOT NULL AND removed_at IS NULL
  AND store_tier = ANY ($1::text[]) AND (expires_at, execution_id, ref_id) > ($2, $3, $4)
ORDER BY expires_at, execution_id, ref_id
LIMIT $5
"""
_BEFORE_ALL = (datetime(1970, 1, 1, tzinfo=UTC), 0, 0)


async def expired(
    conn: Connection | Pool, tiers: Collection[str], *, after: Expired | None, limit: int
) -> list[Expired]:
    """The oldest of these tiers, behind one that was given before."""
    behind = _BEFORE_ALL if after is None else after[:3]
    rows = await conn.fetch(_EXPIRED, list(tiers), *behind, limit)
    return [Expired(*row) for row in rows]


_REMOVE = "SELECT noetl.remove_expired($1, $2)"


async def remove_expired(conn: Connection | Pool, gone: Sequence[Expired]) -> int:
    """Take the payload out of these rows; files of other tiers are removed before this is said."""
    executions = [one.execution_id for one in gone]
    return int(await conn.fetchval(_REMOVE, executions, [one.ref_id for one in gone]))
