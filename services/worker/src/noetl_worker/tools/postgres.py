"""`postgres`: runs SQL. Several statements are one transaction; the last one gives the rows."""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote

import asyncpg
import msgspec

from noetl_core.domain.errors import ToolError
from noetl_worker.tools.sql import bind, split_statements
from noetl_worker.tools.sql_values import from_column, to_column
from noetl_worker.tools.tool import ToolCall, ToolResult, wrong_field

if TYPE_CHECKING:
    _Pool: TypeAlias = asyncpg.Pool[asyncpg.Record]
    _Connection: TypeAlias = asyncpg.pool.PoolConnectionProxy[asyncpg.Record]
else:
    _Pool = asyncpg.Pool
    _Connection = asyncpg.pool.PoolConnectionProxy

POOLS_MAX = 32
POOL_SIZE_DEFAULT = 4
ROWS_MAX = 1_000_000
CONNECT_SECONDS_MAX = 10.0
IDLE_SECONDS_MAX = 60.0

_TRANSACTION_WORDS = ("begin", "start", "commit", "rollback", "end", "abort", "savepoint")
# These refuse to run inside a transaction block.
_ALONE_WORDS = ("vacuum", "create database", "drop database", "alter system", "reindex")


class PostgresTool:
    kind = "postgres"

    def __init__(self) -> None:
        self._pools: OrderedDict[tuple[str, int], _Pool] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    async def run(self, call: ToolCall) -> ToolResult:
        statements = split_statements(_text(call.config))
        if not statements:
            raise wrong_field("command", "has no statement in it")
        dsn = await _dsn(call)
        try:
            pool = await self._pool(dsn, _pool_size(call.config))
            async with pool.acquire() as conn:
                return ToolResult(await _execute(conn, statements, call.config.get("params")))
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
            return ToolResult(error=_error_of(error))

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


async def _execute(conn: _Connection, statements: list[str], params: Any) -> dict[str, Any]:
    result: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        if len(statements) > 1 and not _manages_itself(statements):
            await stack.enter_async_context(conn.transaction())
        for number, statement in enumerate(statements, 1):
            result = await _execute_one(conn, statement, params, number)
    return result | {"statement_count": len(statements)}


async def _execute_one(
    conn: _Connection, statement: str, params: Any, number: int
) -> dict[str, Any]:
    text, values = _bound(statement, params)
    prepared = await conn.prepare(text)
    types = [parameter.name for parameter in prepared.get_parameters()]
    records = await prepared.fetch(*_coerced(values, types, number))
    if len(records) > ROWS_MAX:
        raise wrong_field("command", f"gave more than {ROWS_MAX} rows; add a LIMIT")
    columns = [attribute.name for attribute in prepared.get_attributes()]
    rows = [dict(zip(columns, map(from_column, record), strict=True)) for record in records]
    return {
        "rows": rows,
        "row_count": _affected(prepared.get_statusmsg(), len(rows)),
        "columns": columns,
    }


def _bound(statement: str, params: Any) -> tuple[str, list[Any]]:
    if params is not None and not isinstance(params, Mapping | list | tuple):
        raise wrong_field("params", f"must be a list or a mapping, not {type(params).__name__}")
    try:
        return bind(statement, params)
    except LookupError as error:
        raise wrong_field("params", str(error.args[0])) from None


def _coerced(values: list[Any], types: list[str], number: int) -> list[Any]:
    coerced = []
    for position, (value, type_name) in enumerate(zip(values, types, strict=False), 1):
        try:
            coerced.append(to_column(value, type_name))
        except (ValueError, TypeError, ArithmeticError, LookupError):
            problem = f"value {position} of statement {number} is no {type_name}"
            raise wrong_field("params", problem) from None
    return coerced


def _affected(status: str | None, row_count: int) -> int:
    """`INSERT 0 5` and `UPDATE 5` count what was changed, also without RETURNING."""
    last = (status or "").rsplit(" ", 1)[-1]
    return int(last) if last.isdigit() else row_count


def _manages_itself(statements: list[str]) -> bool:
    """The script opens transactions itself, or holds what cannot run in one."""
    begins = [" ".join(statement.split(None, 3)[:3]).lower() for statement in statements]
    return any(
        begin.split(" ", 1)[0] in _TRANSACTION_WORDS
        or begin.startswith(_ALONE_WORDS)
        or "concurrently" in statement.lower()
        for begin, statement in zip(begins, statements, strict=True)
    )


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


_KINDS = {
    "23": ("db_constraint", False),
    "40": ("db_deadlock", True),
    "08": ("connection", True),
    "28": ("auth", False),
    "53": ("connection", True),
    "57": ("connection", True),
}


def _error_of(error: Exception) -> ToolError:
    if isinstance(error, asyncpg.exceptions.ClientConfigurationError):
        return ToolError(kind="client_error", code="WRONG_DSN", message="`auth` is no usable DSN")
    if not isinstance(error, asyncpg.PostgresError):
        kind = "timeout" if isinstance(error, TimeoutError) else "connection"
        reason = str(error) or type(error).__name__
        return ToolError(
            kind=kind, message=f"no connection to the database: {reason}", retryable=True
        )
    sqlstate = error.sqlstate or ""
    kind, retryable = _KINDS.get(sqlstate[:2], ("client_error", False))
    if sqlstate in {"57014", "55P03"}:
        kind, retryable = "db_timeout", True
    # `detail` is left out: it quotes the values of the row.
    facts = {
        "sqlstate": sqlstate,
        "constraint": getattr(error, "constraint_name", None),
        "table": getattr(error, "table_name", None),
        "column": getattr(error, "column_name", None),
    }
    return ToolError(
        kind=kind,
        code=sqlstate,
        message=str(error).splitlines()[0],
        retryable=retryable,
        details={"pg": {name: fact for name, fact in facts.items() if fact is not None}},
    )
