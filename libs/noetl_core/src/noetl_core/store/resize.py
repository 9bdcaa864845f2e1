"""noetl.resize: every change of the shard count, wished for and done.

    requested ──(one commit of the shard-manager)──> switched ──(projected up to it)──> drained

The protocol, and what a crash leaves of it: docs/adr/0015-the-shard-count-changes-in-one-commit.md
"""

from datetime import datetime
from typing import NamedTuple

import asyncpg

from noetl_core.domain.errors import ConflictError
from noetl_core.domain.ids import EventId
from noetl_core.store.postgres import Connection, Pool


class Generation(NamedTuple):
    """The shard count, and the id that every event under it is above."""

    shard_count: int
    switch_id: EventId


_CURRENT = """
SELECT value::integer, coalesce((SELECT max(switch_id) FROM noetl.resize), 0)
FROM noetl.setting WHERE name = 'shard_count'
"""


async def current(conn: Connection | Pool) -> Generation:
    """Read it after claiming shards: the epoch of a claim fences what was read before a change."""
    row = await conn.fetchrow(_CURRENT)
    assert row is not None  # the schema inserts every setting
    return Generation(row[0], EventId(row[1]))


class Resize(NamedTuple):
    resize_id: int
    shards_from: int
    shards_to: int
    requested_at: datetime
    switched_at: datetime | None
    drained_at: datetime | None
    refused: str | None

    @property
    def is_over(self) -> bool:
        return self.drained_at is not None or self.refused is not None


_NEWEST = """
SELECT resize_id, shards_from, shards_to, requested_at, switched_at, drained_at, refused
FROM noetl.resize ORDER BY requested_at DESC, resize_id DESC LIMIT 1
"""


async def newest(conn: Connection | Pool) -> Resize | None:
    row = await conn.fetchrow(_NEWEST)
    return None if row is None else Resize(*row)


_REQUEST = "INSERT INTO noetl.resize (resize_id, shards_from, shards_to) VALUES ($1, $2, $3)"


async def request(
    conn: Connection | Pool, resize_id: int, *, shards_from: int, shards_to: int
) -> None:
    """Wish for another shard count. Raises ConflictError when it cannot be granted now."""
    now = (await current(conn)).shard_count
    if now != shards_from:
        raise ConflictError(f"there are {now} shards, not {shards_from}: say {now} to change that")
    last = await newest(conn)
    if last is not None and not last.is_over:
        raise _under_way(last.shards_from, last.shards_to)
    try:
        await conn.execute(_REQUEST, resize_id, shards_from, shards_to)
    except asyncpg.UniqueViolationError:
        raise _under_way(shards_from, None) from None


def _under_way(shards_from: int, shards_to: int | None) -> ConflictError:
    target = "" if shards_to is None else f" to {shards_to}"
    return ConflictError(
        f"the change from {shards_from}{target} shards is still under way: "
        "look with `noetl shards`, and try again when it is done"
    )


class Wish(NamedTuple):
    resize_id: int
    shards_from: int
    shards_to: int


_OPEN = """
SELECT resize_id, shards_from, shards_to FROM noetl.resize
WHERE switch_id IS NULL AND refused IS NULL
"""


async def open_wish(conn: Connection | Pool, *, is_locked: bool = False) -> Wish | None:
    """What is wished for and not done yet. Locked, nobody else can do it meanwhile."""
    row = await conn.fetchrow(_OPEN + (" FOR UPDATE" if is_locked else ""))
    return None if row is None else Wish(*row)


_REFUSE = "UPDATE noetl.resize SET refused = $2 WHERE resize_id = $1"


async def refuse(conn: Connection, resize_id: int, reason: str) -> None:
    await conn.execute(_REFUSE, resize_id, reason)


_SWITCHED = """
WITH counted AS (
    UPDATE noetl.setting SET value = to_jsonb($3::integer), updated_at = now()
    WHERE name = 'shard_count'
)
UPDATE noetl.resize SET switch_id = $2, switched_at = now() WHERE resize_id = $1
"""


async def record_switch(conn: Connection, wish: Wish, switch_id: EventId) -> None:
    await conn.execute(_SWITCHED, wish.resize_id, switch_id, wish.shards_to)


# The events up to a switch are closed by its fence, so what is not there now never comes. Shards
# that were set aside count, too: a replay from the beginning has to pass them.
_NEXT_BOUNDARY = """
SELECT min(r.switch_id)
FROM noetl.resize AS r
WHERE r.switch_id IS NOT NULL AND EXISTS (
    SELECT FROM generate_series(
        0, (SELECT max(greatest(shards_from, shards_to)) FROM noetl.resize) - 1
    ) AS shard (shard_id)
    LEFT JOIN noetl.projection_checkpoint AS p USING (shard_id)
    CROSS JOIN LATERAL (
        SELECT FROM noetl.event AS e
        WHERE e.shard_id = shard.shard_id
          AND e.event_id > coalesce(p.last_projected_event_id, 0) AND e.event_id <= r.switch_id
        LIMIT 1
    ) AS unread
)
"""


async def next_boundary(conn: Connection | Pool) -> EventId | None:
    """The switch up to which not every shard is projected yet: nothing past it may be read.

    None when all are passed. That stays so for whoever holds a shard: another switch, or emptying
    the projection, takes its epoch away.
    """
    ((boundary,),) = await conn.fetch(_NEXT_BOUNDARY)
    return None if boundary is None else EventId(boundary)


_DRAINED = """
UPDATE noetl.resize SET drained_at = now()
WHERE switch_id IS NOT NULL AND drained_at IS NULL AND ($1::bigint IS NULL OR switch_id < $1)
RETURNING resize_id
"""


async def mark_drained(conn: Connection | Pool) -> bool:
    """Record that the projection has passed the last switch, if so. True when it just did."""
    last = await newest(conn)
    if last is None or last.is_over or last.switched_at is None:
        return False
    boundary = await next_boundary(conn)
    return bool(await conn.fetch(_DRAINED, boundary))
