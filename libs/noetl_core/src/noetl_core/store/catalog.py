"""noetl.catalog: playbooks by path, each version immutable."""

from datetime import datetime
from typing import NamedTuple

from noetl_core.domain.ids import CatalogId
from noetl_core.store.postgres import Connection, Pool


class CatalogEntry(NamedTuple):
    catalog_id: CatalogId
    path: str
    version: int
    created_at: datetime


class CatalogContent(NamedTuple):
    catalog_id: CatalogId
    path: str
    version: int
    created_at: datetime
    content: str
    sha256: bytes


class Registration(NamedTuple):
    """`created` is False when the path's newest version had this content already."""

    entry: CatalogEntry
    created: bool


# Registrations of one path go one after the other, so each sees the version before it.
_LOCK_PATH = "SELECT pg_advisory_xact_lock(hashtextextended('noetl.catalog ' || $1, 0))"

_NEWEST = """
SELECT catalog_id, path, version, created_at, sha256 FROM noetl.catalog
WHERE path = $1
ORDER BY version DESC
LIMIT 1
"""

_INSERT = """
INSERT INTO noetl.catalog (catalog_id, path, version, content, sha256)
VALUES ($1, $2, $3, $4, $5)
RETURNING catalog_id, path, version, created_at
"""


async def register(
    conn: Connection, catalog_id: CatalogId, *, path: str, content: str, sha256: bytes
) -> Registration:
    """Add a version, unless the newest has the same content. Runs inside a transaction.

    Content that an older version had becomes a new version: whoever registers it again wants it
    to be the newest.
    """
    await conn.execute(_LOCK_PATH, path)
    newest = await conn.fetchrow(_NEWEST, path)
    if newest is not None and newest["sha256"] == sha256:
        return Registration(CatalogEntry(*newest[:4]), created=False)
    version = 1 if newest is None else newest["version"] + 1
    row = await conn.fetchrow(_INSERT, catalog_id, path, version, content, sha256)
    assert row is not None, path
    return Registration(CatalogEntry(*row), created=True)


# Both orders are served by the unique index on (path, version).
_FIND = """
SELECT catalog_id, path, version, created_at FROM noetl.catalog
WHERE path = $1 AND ($2::integer IS NULL OR version = $2)
ORDER BY version DESC
LIMIT 1
"""


async def find(
    conn: Connection | Pool, path: str, *, version: int | None = None
) -> CatalogEntry | None:
    """That version of the path, or its newest."""
    row = await conn.fetchrow(_FIND, path, version)
    return None if row is None else CatalogEntry(*row)


_READ = """
SELECT catalog_id, path, version, created_at, content, sha256 FROM noetl.catalog
WHERE path = $1 AND ($2::integer IS NULL OR version = $2)
ORDER BY version DESC
LIMIT 1
"""


async def read(
    conn: Connection | Pool, path: str, *, version: int | None = None
) -> CatalogContent | None:
    row = await conn.fetchrow(_READ, path, version)
    return None if row is None else CatalogContent(*row)


_CONTENT = "SELECT content FROM noetl.catalog WHERE catalog_id = $1"


async def content_of(conn: Connection | Pool, catalog_id: CatalogId) -> str | None:
    content: str | None = await conn.fetchval(_CONTENT, catalog_id)
    return content


_NEWEST_OF_EACH = """
SELECT DISTINCT ON (path) catalog_id, path, version, created_at FROM noetl.catalog
WHERE path > $1
ORDER BY path, version DESC
LIMIT $2
"""


async def newest_of_each(
    conn: Connection | Pool, *, after_path: str, limit: int
) -> list[CatalogEntry]:
    """The newest version of every path past `after_path`, in order of path."""
    rows = await conn.fetch(_NEWEST_OF_EACH, after_path, limit)
    return [CatalogEntry(*row) for row in rows]
