"""`postgres`: runs SQL. Several statements are one transaction; the last one gives the rows."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote

import asyncpg
import msgspec

from noetl_worker.tools.postgres_errors import EXPECTED, error_of
from noetl_worker.tools.postgres_statements import (
    Connection,
    execute,
    read_in_chunks,
    stream,
)
from noetl_worker.tools.sql import split_statements
from noetl_worker.tools.tool import ToolCall, ToolResult, wrong_field

if TYPE_CHECKING:
    _Pool: TypeAlias = asyncpg.Pool[asyncpg.Record]
else:
    _Pool = asyncpg.Pool

POOLS_MAX = 32
POOL_SIZE_DEFAULT = 4
CHUNK_ROWS_MAX = 100_000
CONNECT_SECONDS_MAX = 10.0
IDLE_SECONDS_MAX = 60.0


class PostgresTool:
    kind = "postgres"

    def __init__(self) -> None:
        self._pools: OrderedDict[tuple[str, int], _Pool] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()
        self.busy = 0
        """Calls that have a connection, or wait for one."""

    @property
    def size(self) -> int:
        """Connections that it may open to the databases it has met; to another one as many again.
        Before the first it is those of that one."""
        return sum(size for _, size in self._pools) or POOL_SIZE_DEFAULT

    async def run(self, call: ToolCall) -> ToolResult:
        statements = statements_of(call.config)
        chunk_size = _chunk_size(call.config, statements)
        try:
            async with self.connection(call) as conn:
                return ToolResult(await _answer(conn, call, statements, chunk_size))
        except EXPECTED as error:
            return ToolResult(error=error_of(error))

    @asynccontextmanager
    async def connection(self, call: ToolCall) -> AsyncIterator[Connection]:
        """One to the database that the call's `auth` says; raises what is EXPECTED."""
        dsn = await _dsn(call)
        pool = await self._pool(dsn, _pool_size(call.config))
        self.busy += 1
        try:
            async with pool.acquire() as conn:
                yield conn
        finally:
            self.busy -= 1

    async def close(self) -> None:
        await asyncio.gather(*self._closing, *(_close(pool) for pool in self._pools.values()))
        self._pools.clear()

    async def _pool(self, dsn: str, size: int) -> _Pool:
        key = (dsn, size)
        pool = self._pools.get(key)
        if pool is None:
            # min_size=0 connects nothing: opening it neither waits nor fails.
            pool = self._pools[key] = await asyncpg.create_pool(
                dsn,
                min_size=0,
                max_size=size,
                max_inactive_connection_lifetime=IDLE_SECONDS_MAX,
                timeout=CONNECT_SECONDS_MAX,
                init=_read_json,
                server_settings={"application_name": "noetl"},
            )
            self._forget_oldest()
        self._pools.move_to_end(key)
        return pool

    def _forget_oldest(self) -> None:
        if len(self._pools) > POOLS_MAX:
            _, oldest = self._pools.popitem(last=False)
            task = asyncio.create_task(_close(oldest))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


async def _answer(
    conn: Connection, call: ToolCall, statements: list[str], chunk_size: int | None
) -> dict[str, Any]:
    params = call.config.get("params")
    if chunk_size is None:
        return await execute(conn, statements, params)
    if call.emit is None:
        return await read_in_chunks(conn, statements[0], params, chunk_size=chunk_size)
    return await stream(
        conn,
        statements[0],
        params,
        chunk_size=chunk_size,
        emit=call.emit,
        chunks_done=call.chunks_done,
    )


def statements_of(config: Mapping[str, Any]) -> list[str]:
    statements = split_statements(_text(config))
    if not statements:
        raise wrong_field("command", "has no statement in it")
    return statements


def _text(config: Mapping[str, Any]) -> str:
    for field in ("command", "query", "script"):
        value = config.get(field)
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return ";\n".join(map(str, value))
        if value is not None:
            raise wrong_field(field, f"must be text, not {type(value).__name__}")
    raise wrong_field("command", "is missing")


def _chunk_size(config: Mapping[str, Any], statements: list[str]) -> int | None:
    size = config.get("chunk_size")
    if size is None:
        return None
    if not isinstance(size, int) or not 0 < size <= CHUNK_ROWS_MAX:
        raise wrong_field("chunk_size", f"must be a number of rows from 1 to {CHUNK_ROWS_MAX}")
    if len(statements) > 1:
        raise wrong_field("chunk_size", "is for one statement that reads, not for a script")
    return size


def _pool_size(config: Mapping[str, Any]) -> int:
    pool = config.get("pool")
    size = pool.get("max_size") if isinstance(pool, Mapping) else pool
    if size is None:
        return POOL_SIZE_DEFAULT
    if not isinstance(size, int) or not 0 < size <= 100:  # noqa: PLR2004
        raise wrong_field("pool", "must be a number of connections from 1 to 100")
    return size


async def _dsn(call: ToolCall) -> str:
    auth = call.config.get("auth", call.config.get("dsn"))
    if isinstance(auth, Mapping):
        return dsn_of(auth)
    if not isinstance(auth, str) or not auth:
        raise wrong_field("auth", "must name a credential, or be a DSN")
    if "://" in auth:
        return auth
    credential = await call.credential(auth)
    return dsn_of(credential.data)


def dsn_of(data: Mapping[str, Any]) -> str:
    """From `dsn`, or from `db_host, db_port, db_name, db_user, db_password`."""
    if data.get("dsn"):
        return str(data["dsn"])
    if not data.get("db_host") or not data.get("db_name"):
        raise wrong_field("auth", "has neither `dsn` nor `db_host` and `db_name`")
    user = quote(str(data.get("db_user", "")), safe="")
    password = quote(str(data.get("db_password", "")), safe="")
    login = f"{user}:{password}@" if password else f"{user}@" if user else ""
    host, port = data["db_host"], data.get("db_port", 5432)
    return f"postgresql://{login}{host}:{port}/{quote(str(data['db_name']), safe='')}"


async def _read_json(conn: Any) -> None:
    for name in ("json", "jsonb"):
        await conn.set_type_codec(
            name, schema="pg_catalog", encoder=str, decoder=msgspec.json.decode, format="text"
        )


async def _close(pool: _Pool) -> None:
    try:
        await asyncio.wait_for(pool.close(), timeout=5)
    except TimeoutError:
        pool.terminate()
