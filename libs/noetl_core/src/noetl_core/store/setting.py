"""noetl.setting: what every process must agree on."""

from typing import TypeVar

import msgspec

from noetl_core.store.postgres import Connection, Pool

T = TypeVar("T")

_READ = "SELECT value FROM noetl.setting WHERE name = $1"

_WRITE = """
INSERT INTO noetl.setting (name, value) VALUES ($1, $2::jsonb)
ON CONFLICT (name) DO UPDATE SET value = excluded.value, updated_at = now()
"""


async def read_setting(conn: Connection | Pool, name: str, kind: type[T]) -> T:
    value = await conn.fetchval(_READ, name)
    assert value is not None, name  # the schema inserts every setting
    return msgspec.json.decode(value, type=kind)


async def write_setting(conn: Connection | Pool, name: str, value: object) -> None:
    await conn.execute(_WRITE, name, msgspec.json.encode(value).decode())


async def shard_count(conn: Connection | Pool) -> int:
    return await read_setting(conn, "shard_count", int)
