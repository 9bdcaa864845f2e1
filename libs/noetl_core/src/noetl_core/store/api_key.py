"""noetl.api_key: who may do what. A key is shown once, when it is made; here is its digest.

Looking a digest up tells nothing of a key by the time it takes: who guesses a key cannot choose its
SHA-256 bit by bit. A key is 256 random bits, so the digest needs no salt.
"""

import hashlib
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from noetl_core.domain.roles import Role
from noetl_core.store.postgres import Connection, Pool


class ApiKey(NamedTuple):
    """What may be shown of a key."""

    key_id: str
    name: str
    role: Role
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


_COLUMNS = "key_id, name, role, created_at, expires_at, revoked_at"

_CREATE = f"""
INSERT INTO noetl.api_key (key_id, sha256, name, role, expires_at)
VALUES ($1, $2, $3, $4, now() + make_interval(days => $5))
ON CONFLICT (name) WHERE revoked_at IS NULL DO NOTHING
RETURNING {_COLUMNS}
"""  # noqa: S608 - a constant


async def create(
    conn: Connection | Pool, *, key_id: str, sha256: bytes, name: str, role: Role, days: int | None
) -> ApiKey | None:
    """None: there is one of that name, and it is not revoked."""
    row = await conn.fetchrow(_CREATE, key_id, sha256, name, role, days)
    return None if row is None else ApiKey(*row)


_LIST = f"SELECT {_COLUMNS} FROM noetl.api_key ORDER BY name, created_at"  # noqa: S608 - a constant


async def list_all(conn: Connection | Pool) -> Sequence[ApiKey]:
    return [ApiKey(*row) for row in await conn.fetch(_LIST)]


_REVOKE = """
UPDATE noetl.api_key SET revoked_at = now() WHERE name = $1 AND revoked_at IS NULL
RETURNING key_id
"""


async def revoke(conn: Connection | Pool, name: str) -> bool:
    """Whether there was one."""
    return await conn.fetchval(_REVOKE, name) is not None


_FIND = f"""
SELECT {_COLUMNS} FROM noetl.api_key
WHERE sha256 = $1 AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())
"""  # noqa: S608 - a constant


async def find(conn: Connection | Pool, sha256: bytes) -> ApiKey | None:
    """The key with that digest, if it counts."""
    row = await conn.fetchrow(_FIND, sha256)
    return None if row is None else ApiKey(*row)


_ANY = "SELECT EXISTS (SELECT FROM noetl.api_key)"


async def are_used(conn: Connection | Pool) -> bool:
    """Whether a key was ever made. Revoking the last one opens nothing again."""
    return bool(await conn.fetchval(_ANY))
