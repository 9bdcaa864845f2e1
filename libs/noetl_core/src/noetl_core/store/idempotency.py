"""noetl.idempotency: which execution a client's key stands for.

The row commits together with the inbox row of its execution, by one statement. A second request
with the same key waits in the unique index until the first has committed or rolled back, so there
is no moment at which both believe to be the first.
"""

from datetime import datetime
from typing import NamedTuple

from noetl_core.domain.ids import ExecutionId, ShardId
from noetl_core.store.postgres import Connection, Pool


class Keyed(NamedTuple):
    """`fingerprint` tells the same request from another one under the same key."""

    execution_id: ExecutionId
    fingerprint: bytes


_PROMISE_ONCE = """
WITH claimed AS (
    INSERT INTO noetl.idempotency (idempotency_key, execution_id, fingerprint)
    VALUES ($1, $2, $3)
    ON CONFLICT (idempotency_key) DO NOTHING
    RETURNING execution_id
)
INSERT INTO noetl.inbox (shard_id, execution_id, body)
SELECT noetl.vnode(execution_id) % value::integer, execution_id, $4
FROM claimed, noetl.setting WHERE name = 'shard_count'
RETURNING shard_id
"""


async def promise_once(
    conn: Connection | Pool, key: str, wanted: Keyed, body: bytes
) -> ShardId | None:
    """Like inbox.promise. None, and nothing is written, when the key is taken already."""
    shard_id = await conn.fetchval(_PROMISE_ONCE, key, *wanted, body)
    return None if shard_id is None else ShardId(shard_id)


_FIND = "SELECT execution_id, fingerprint FROM noetl.idempotency WHERE idempotency_key = $1"


async def find(conn: Connection | Pool, key: str) -> Keyed | None:
    row = await conn.fetchrow(_FIND, key)
    return None if row is None else Keyed(ExecutionId(row["execution_id"]), row["fingerprint"])


_FORGET = """
DELETE FROM noetl.idempotency WHERE idempotency_key IN (
    SELECT idempotency_key FROM noetl.idempotency
    WHERE created_at < $1 ORDER BY created_at LIMIT $2
)
"""


async def forget(conn: Connection | Pool, *, before: datetime, limit: int) -> int:
    """Remove keys that are older than anybody repeats a request."""
    return int((await conn.execute(_FORGET, before, limit)).rsplit(" ", 1)[-1])
