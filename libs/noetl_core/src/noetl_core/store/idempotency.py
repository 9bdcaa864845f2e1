"""noetl.idempotency: which execution a client's key stands for.

The row commits together with the inbox row of its execution. A second request with the same key
waits in the unique index until the first has committed or rolled back, so there is no moment at
which both believe to be the first.
"""

from typing import NamedTuple

from noetl_core.domain.ids import ExecutionId
from noetl_core.store.postgres import Connection


class Keyed(NamedTuple):
    """`fingerprint` tells the same request from another one under the same key."""

    execution_id: ExecutionId
    fingerprint: bytes


_CLAIM = """
INSERT INTO noetl.idempotency (idempotency_key, fingerprint, execution_id)
VALUES ($1, $2, $3)
ON CONFLICT (idempotency_key) DO NOTHING
"""

_FIND = "SELECT execution_id, fingerprint FROM noetl.idempotency WHERE idempotency_key = $1"


async def claim(conn: Connection, key: str, wanted: Keyed) -> Keyed:
    """What the key stands for from now on: `wanted`, or what an earlier request made of it."""
    done = await conn.execute(_CLAIM, key, wanted.fingerprint, wanted.execution_id)
    if done == "INSERT 0 1":
        return wanted
    row = await conn.fetchrow(_FIND, key)
    assert row is not None, key
    return Keyed(ExecutionId(row["execution_id"]), row["fingerprint"])
