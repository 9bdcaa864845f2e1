"""noetl.credential: encrypted at rest; what is read here is useless without the workers' key."""

from datetime import datetime
from typing import NamedTuple

from noetl_core.store.postgres import Connection, Pool


class Sealed(NamedTuple):
    """Encrypted data and what is needed, besides the key, to open it (see process/secrets.py)."""

    key_id: str
    nonce: bytes
    ciphertext: bytes


class CredentialEntry(NamedTuple):
    """What may be shown of a credential."""

    name: str
    type: str
    key_id: str
    created_at: datetime
    updated_at: datetime


class CredentialRow(NamedTuple):
    name: str
    type: str
    sealed: Sealed


_UPSERT = """
INSERT INTO noetl.credential (name, type, key_id, nonce, ciphertext)
VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (name) DO UPDATE
SET type = excluded.type, key_id = excluded.key_id, nonce = excluded.nonce,
    ciphertext = excluded.ciphertext, updated_at = now()
RETURNING name, type, key_id, created_at, updated_at
"""


async def upsert(
    conn: Connection | Pool, name: str, *, kind: str, sealed: Sealed
) -> CredentialEntry:
    row = await conn.fetchrow(_UPSERT, name, kind, *sealed)
    assert row is not None, name
    return CredentialEntry(*row)


_LIST = """
SELECT name, type, key_id, created_at, updated_at FROM noetl.credential
WHERE name > $1
ORDER BY name
LIMIT $2
"""


async def list_entries(
    conn: Connection | Pool, *, after_name: str = "", limit: int = 1000
) -> list[CredentialEntry]:
    """In order of name, without what is secret."""
    return [CredentialEntry(*row) for row in await conn.fetch(_LIST, after_name, limit)]


_DELETE = "DELETE FROM noetl.credential WHERE name = $1 RETURNING name"


async def delete(conn: Connection | Pool, name: str) -> bool:
    """Whether there was one."""
    return await conn.fetchval(_DELETE, name) is not None


_LOAD = "SELECT name, type, key_id, nonce, ciphertext FROM noetl.credential WHERE name = $1"


async def load(conn: Connection | Pool, name: str) -> CredentialRow | None:
    row = await conn.fetchrow(_LOAD, name)
    return None if row is None else CredentialRow(row[0], row[1], Sealed(*row[2:]))
