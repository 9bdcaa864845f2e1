"""noetl.inbox: the durable road into a shard. A row leaves in the broker's commit that acts on it.

A body is a batch of messages (wire/messages.py). What a client was promised carries its
execution, so that a request which no broker has seen yet can be found.
"""

from collections.abc import Sequence
from typing import NamedTuple

from noetl_core.domain.ids import ExecutionId, ShardId
from noetl_core.store.postgres import Connection, Pool

BYTES_MAX = 16 * 1024 * 1024


class InboxRow(NamedTuple):
    inbox_id: int
    shard_id: ShardId
    body: bytes


_PUT = "INSERT INTO noetl.inbox (shard_id, body) VALUES ($1, $2)"


async def put(conn: Connection | Pool, shard_id: ShardId, body: bytes) -> None:
    await conn.execute(_PUT, shard_id, body)


# Of the message that rides on this nobody keeps a copy, so it must outlive a crash of Postgres even
# where the connection says that commits need not wait for the disk.
_PUT_DURABLY = """
WITH durable AS MATERIALIZED (SELECT set_config('synchronous_commit', 'on', true) AS setting)
INSERT INTO noetl.inbox (shard_id, body) SELECT $1, $2 FROM durable WHERE setting = 'on'
"""


async def put_durably(conn: Connection | Pool, shard_id: ShardId, body: bytes) -> None:
    """When this returns, the message is on disk."""
    await conn.execute(_PUT_DURABLY, shard_id, body)


# The shard is worked out where the shard count is, so a promise never goes by a stale one.
_PROMISE = """
INSERT INTO noetl.inbox (shard_id, execution_id, body)
SELECT noetl.vnode($1) % value::integer, $1, $2
FROM noetl.setting WHERE name = 'shard_count'
RETURNING shard_id
"""


async def promise(conn: Connection | Pool, execution_id: ExecutionId, body: bytes) -> ShardId:
    """Commit a request about one execution; says which shard to wake."""
    return ShardId(await conn.fetchval(_PROMISE, execution_id, body))


# The backlog of others is passed over row by row: 0.1 ms for 1,000 of them, which is less than what
# it costs to look shard by shard.
_WAITING = """
WITH oldest AS (
    SELECT inbox_id, shard_id, body FROM noetl.inbox
    WHERE shard_id = ANY ($1::integer[])
    ORDER BY inbox_id
    LIMIT $2
), sized AS (
    SELECT oldest.*, sum(octet_length(body)) OVER earlier AS before
    FROM oldest
    WINDOW earlier AS (ORDER BY inbox_id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
)
SELECT inbox_id, shard_id, body FROM sized
WHERE coalesce(before, 0) < $3
ORDER BY inbox_id
"""


async def waiting(
    conn: Connection | Pool,
    shard_ids: Sequence[ShardId],
    *,
    limit: int,
    bytes_max: int = BYTES_MAX,
) -> list[InboxRow]:
    """The oldest rows of these shards, until the next would come after so many bytes. They stay
    until their ids are given to a commit."""
    rows = await conn.fetch(_WAITING, shard_ids, limit, bytes_max)
    return [InboxRow(row["inbox_id"], ShardId(row["shard_id"]), row["body"]) for row in rows]


_DELETE = "DELETE FROM noetl.inbox WHERE inbox_id = ANY ($1::bigint[])"


async def delete(conn: Connection | Pool, inbox_ids: Sequence[int]) -> None:
    """For rows that lead to no commit, such as one that was parked in noetl.dead_letter."""
    await conn.execute(_DELETE, inbox_ids)
