"""Indexes that are made while others write: CREATE INDEX CONCURRENTLY, and what belongs to it.

A build that dies leaves an index that is INVALID: every write pays for it and no read may use it.
So one that is found is dropped and made again; one that is valid was made by a run that died before
it could say so.

Postgres does not do this with a partitioned table. There the index is made on the parent alone,
which is a matter of the catalog, then on each partition concurrently, and attached. With the last
one the index of the parent becomes valid. Partitions that come meanwhile have it already; those
that go take theirs with them.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import NamedTuple

import asyncpg

from noetl_core.store.migration_file import MigrationInvalidError, Statement
from noetl_core.store.migration_locks import Locks
from noetl_core.store.postgres import Connection

ROUNDS_MAX = 100
"""A partition that is made or dropped in a round costs another one: more are a bug."""

_NAME_BYTES_MAX = 63

_CREATE = re.compile(
    r"CREATE\s+(?P<unique>UNIQUE\s+)?INDEX\s+CONCURRENTLY\s+(IF\s+NOT\s+EXISTS\s+)?"
    r"(?P<name>\w+)\s+ON\s+noetl\.(?P<table>\w+)\s+(?P<rest>.+)",
    re.IGNORECASE | re.DOTALL,
)


class Index(NamedTuple):
    name: str
    table: str
    kind: str
    rest: str
    """What follows the name of the table: columns, conditions."""

    def of_partition(self, partition: str) -> "Index":
        name = f"{partition}_{self.name}"
        if len(name) > _NAME_BYTES_MAX:
            raise MigrationInvalidError(f"the name of the index {name} is too long: shorten it")
        return self._replace(name=name, table=partition)


def read_index(statement: Statement) -> Index:
    found = _CREATE.fullmatch(statement.text)
    if found is None:
        raise MigrationInvalidError(
            f"line {statement.line}: write it as"
            " CREATE [UNIQUE] INDEX CONCURRENTLY name ON noetl.table (...)"
        )
    kind = "UNIQUE INDEX" if found["unique"] else "INDEX"
    return Index(found["name"].lower(), found["table"].lower(), kind, found["rest"])


_KIND_OF_TABLE = "SELECT relkind::text FROM pg_class WHERE oid = to_regclass('noetl.' || $1)"

_FIND = """
SELECT i.indisvalid AS is_valid, t.relname AS table
FROM pg_index AS i JOIN pg_class AS t ON t.oid = i.indrelid
WHERE i.indexrelid = to_regclass('noetl.' || $1)
"""


async def ensure_index(conn: Connection, locks: Locks, index: Index) -> None:
    """It is there and valid when this returns; raises what Postgres says if it cannot be."""
    if await conn.fetchval(_KIND_OF_TABLE, index.table) == "p":
        await _ensure_partitioned(conn, locks, index)
    else:
        await _build(conn, locks, index)


async def _build(conn: Connection, locks: Locks, index: Index) -> None:
    found = await conn.fetchrow(_FIND, index.name)
    if found is not None and found["table"] != index.table:
        raise MigrationInvalidError(f"{found['table']} has an index {index.name} already")
    if found is not None and found["is_valid"]:
        return

    async def build() -> None:
        await _drop_invalid(conn, index)
        create = f"CREATE {index.kind} CONCURRENTLY {index.name} ON noetl.{index.table}"
        await conn.execute(f"{create} {index.rest}", timeout=None)

    try:
        await locks.patiently(build)
    except asyncpg.PostgresError:
        # The next run would do it too, but until then every write would pay for it.
        with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            await _drop_invalid(conn, index)
        raise


async def _drop_invalid(conn: Connection, index: Index) -> None:
    found = await conn.fetchrow(_FIND, index.name)
    if found is not None and not found["is_valid"]:
        await conn.execute(f"DROP INDEX CONCURRENTLY noetl.{index.name}", timeout=None)


_WITHOUT = """
SELECT p.relname
FROM pg_inherits AS h JOIN pg_class AS p ON p.oid = h.inhrelid
WHERE h.inhparent = to_regclass('noetl.' || $1) AND NOT EXISTS (
    SELECT FROM pg_index AS i JOIN pg_inherits AS a ON a.inhrelid = i.indexrelid
    WHERE i.indrelid = p.oid AND a.inhparent = to_regclass('noetl.' || $2)
)
ORDER BY p.relname
"""


async def _ensure_partitioned(conn: Connection, locks: Locks, index: Index) -> None:
    async def on_parent() -> None:
        await locks.execute(
            f"CREATE {index.kind} IF NOT EXISTS {index.name} ON ONLY noetl.{index.table}"
            f" {index.rest}"
        )

    await locks.briefly(on_parent)
    for _ in range(ROUNDS_MAX):
        rows = await conn.fetch(_WITHOUT, index.table, index.name)
        if not rows:
            break
        for row in rows:
            with _dropped_meanwhile():
                await _ensure_on(conn, locks, index, index.of_partition(row["relname"]))
    found = await conn.fetchrow(_FIND, index.name)
    if found is None or not found["is_valid"]:
        raise MigrationInvalidError(f"{index.name} did not become valid on {index.table}")


async def _ensure_on(conn: Connection, locks: Locks, parent: Index, child: Index) -> None:
    await _build(conn, locks, child)

    async def attach() -> None:
        await locks.execute(f"ALTER INDEX noetl.{parent.name} ATTACH PARTITION noetl.{child.name}")

    await locks.briefly(attach)


@contextlib.contextmanager
def _dropped_meanwhile() -> Iterator[None]:
    """The compactor drops partitions at any time: the next round does not find it any more."""
    with contextlib.suppress(asyncpg.UndefinedTableError, asyncpg.UndefinedObjectError):
        yield
