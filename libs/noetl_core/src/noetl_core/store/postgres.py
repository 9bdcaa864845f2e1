"""Connections to Postgres: one pool per service, opened under the role of that service.

No JSON codec is set on purpose: `jsonb` travels as text, and the module that owns a table encodes
and decodes it with msgspec.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import asyncpg
import structlog
from asyncpg.pool import PoolConnectionProxy

if TYPE_CHECKING:
    Pool: TypeAlias = asyncpg.Pool[asyncpg.Record]
    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record] | PoolConnectionProxy[asyncpg.Record]
else:
    Pool = asyncpg.Pool
    Connection = asyncpg.Connection | PoolConnectionProxy

CONNECT_WAIT_SECONDS = 30.0
COMMAND_TIMEOUT_SECONDS = 60.0
CONNECT_SECONDS_MIN = 2.0
LINE_PROBE_IDLE_SECONDS = 4
LINE_PROBE_SECONDS = 2
LINE_PROBES = 2
LINE_DEAD_SECONDS = LINE_PROBE_IDLE_SECONDS + LINE_PROBE_SECONDS * LINE_PROBES
"""A connection whose other end has vanished without a word is known to be dead after this: sooner
than a process that has just missed a heartbeat counts as dead, and much sooner than its leases end.
"""
TRANSACTION_IDLE_SECONDS = 10
"""A transaction that hears nothing of us for so long is ended by Postgres, and its locks with it.
Its process may be stopped, or its host gone: until then nobody else can have the shards whose rows
it has locked. None of ours does anything but statements between BEGIN and COMMIT.
"""
_RETRY_SECONDS = 0.5

# What the same statement may survive a moment later: the server went away, is starting, changed
# over to a standby, chose our transaction as the victim of a deadlock, or gave us up because we
# stood still in the middle of one.
TRANSIENT_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.exceptions.OperatorInterventionError,
    asyncpg.exceptions.InsufficientResourcesError,
    asyncpg.exceptions.TransactionRollbackError,
    asyncpg.exceptions.IdleInTransactionSessionTimeoutError,
    asyncpg.exceptions.ReadOnlySQLTransactionError,
    asyncpg.exceptions.InternalClientError,
)

# What a migration under our feet does to a statement; a moment later it has got used to it. Its
# plan has other result types than when it was prepared, or somebody had set a lock_timeout.
_SCHEMA_MOVED: tuple[type[Exception], ...] = (
    asyncpg.exceptions.InvalidCachedStatementError,
    asyncpg.exceptions.LockNotAvailableError,
)
# Or it was planned with something that was replaced before it came to use it. Postgres has one code
# for that and for its own bugs; these texts are never translated.
_CATALOG_MOVED = (
    "cache lookup failed for",
    "could not open relation with OID",
    "tuple concurrently",
)

T = TypeVar("T")

log = structlog.get_logger()


def is_postgres_away(error: BaseException) -> bool:
    """True when the statement failed because of the connection, or because the schema was being
    changed, and not because of the statement: the same may succeed a moment later."""
    if isinstance(error, TRANSIENT_ERRORS + _SCHEMA_MOVED):
        return True
    if isinstance(error, asyncpg.InternalServerError):
        return any(text in str(error) for text in _CATALOG_MOVED)
    # asyncpg has one class for a lost connection and for a wrong use of it: only the text tells.
    # A session that dies in our hands is "closed", or "released" if the pool noticed it first.
    text = str(error) if isinstance(error, asyncpg.InterfaceError) else ""
    return "is closed" in text or "released back" in text or "closing" in text


def is_schema_wrong(error: BaseException) -> bool:
    """True when the statement names what is not there, or may not be touched by us: no data could
    have made it right. The schema is of another version than this code, or the code has a bug."""
    return isinstance(error, asyncpg.exceptions.SyntaxOrAccessError)


async def in_transaction(conn: Connection, work: Callable[[Connection], Awaitable[T]]) -> T:
    """Do `work` in a transaction, and once more where a migration has outdated a cached plan.

    For a single statement asyncpg does that itself. A transaction has failed as a whole by then; by
    the second time the connection has forgotten all its plans.
    """
    try:
        async with conn.transaction():
            return await work(conn)
    except asyncpg.exceptions.InvalidCachedStatementError:
        async with conn.transaction():
            return await work(conn)


_CLOCK = "SELECT extract(epoch FROM clock_timestamp())::double precision"


async def clock_of(conn: Connection | Pool) -> float:
    """What time it is for the database, in seconds since 1970. It may be put forward, or back."""
    seconds: float = await conn.fetchval(_CLOCK)
    return seconds


@asynccontextmanager
async def open_pool(
    dsn: str,
    *,
    role: str,
    size_max: int,
    size_min: int = 1,
    command_seconds: float = COMMAND_TIMEOUT_SECONDS,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[Pool]:
    """A pool whose sessions act as `role`; an empty role stays the user of the DSN.

    Waits up to CONNECT_WAIT_SECONDS for a Postgres that is still starting. `settings` are server
    settings of every session, such as `synchronous_commit`. A statement that has no answer
    after `command_seconds` is given up, and after as long again its connection, too.
    """
    pool = await _connect(dsn, role, size_min, size_max, command_seconds, settings)
    try:
        yield pool
    finally:
        await _close(pool)


async def _connect(
    dsn: str,
    role: str,
    size_min: int,
    size_max: int,
    command_seconds: float,
    settings: Mapping[str, str],
) -> Pool:
    deadline = asyncio.get_running_loop().time() + CONNECT_WAIT_SECONDS
    told = False
    while True:
        try:
            return await asyncpg.create_pool(
                dsn,
                min_size=min(size_min, size_max),
                max_size=size_max,
                command_timeout=command_seconds,
                timeout=max(CONNECT_SECONDS_MIN, command_seconds),
                server_settings=_server_settings(role, settings),
                init=_watch_line,
                reset=_leave_session,
            )
        except (OSError, asyncpg.PostgresError, asyncpg.InternalClientError) as error:
            if not isinstance(error, (*TRANSIENT_ERRORS, asyncpg.InvalidParameterValueError)):
                raise
            if asyncio.get_running_loop().time() > deadline:
                raise
            if not told:
                log.warning("postgres.awaited", role=role, error=_why(error))
                told = True
            await asyncio.sleep(_RETRY_SECONDS)


def _why(error: Exception) -> str:
    """The first migrations make the roles: without ours nobody has applied them yet."""
    is_unmigrated = isinstance(error, asyncpg.InvalidParameterValueError)
    return f"{error}; has `noetl db migrate` been run?" if is_unmigrated else str(error)


def _server_settings(role: str, settings: Mapping[str, str]) -> dict[str, str]:
    # Every statement here is short: compiling one costs more than it gains.
    base = {"application_name": role or "noetl", "jit": "off"}
    # Archives are made of dates as text, which looks the same whatever the database is set to.
    dates = {"timezone": "UTC", "datestyle": "ISO"}
    return {**base, **dates, **_limits(), **({"role": role} if role else {}), **settings}


def _limits() -> dict[str, str]:
    """How soon the server notices that we are gone. Over a unix socket it takes those of the line
    for zero: its other end cannot vanish without a word."""
    return {
        "idle_in_transaction_session_timeout": f"{TRANSACTION_IDLE_SECONDS * 1000:.0f}",
        "tcp_keepalives_idle": str(LINE_PROBE_IDLE_SECONDS),
        "tcp_keepalives_interval": str(LINE_PROBE_SECONDS),
        "tcp_keepalives_count": str(LINE_PROBES),
        "tcp_user_timeout": str(LINE_DEAD_SECONDS * 1000),
    }


async def _watch_line(connection: Any) -> None:
    """Have the kernel notice that nobody is at the other end any more: a host that is gone, a
    firewall that forgot us. A statement would wait for its whole time; a slow one is left alone."""
    line: socket.socket | None = connection._transport.get_extra_info("socket")
    if line is None or line.family not in (socket.AF_INET, socket.AF_INET6):
        return
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _LINE_OPTIONS.items():
        if hasattr(socket, name):  # not every system has each of them
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


_LINE_OPTIONS = {
    "TCP_KEEPIDLE": LINE_PROBE_IDLE_SECONDS,
    "TCP_KEEPINTVL": LINE_PROBE_SECONDS,
    "TCP_KEEPCNT": LINE_PROBES,
    "TCP_USER_TIMEOUT": LINE_DEAD_SECONDS * 1000,
}


async def _leave_session(_connection: Any) -> None:
    """Sessions hold no state of ours, so giving one back costs no round trip."""


async def _close(pool: Pool) -> None:
    try:
        await asyncio.wait_for(pool.close(), timeout=5)
    except TimeoutError:
        pool.terminate()
