"""process/resilience.py: what a killed Postgres does to a service, and what a bug does."""

import asyncio

import asyncpg
import pytest

from noetl_core.domain.errors import RejectedError, RetryableError
from noetl_core.process.config import Config
from noetl_core.process.resilience import BACKOFF_SECONDS_MAX, backoff_seconds, is_transient
from noetl_core.process.service import Service, serving
from noetl_core.store.postgres import Connection, Pool, in_transaction, open_pool
from support.postgres import PostgresServer

SECONDS_MAX = 60


async def failure_of(pool: Pool, statement: str, *arguments: object) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is what we ask
        await pool.execute(statement, *arguments)
    return caught.value


@pytest.mark.parametrize("way", ["stop", "kill"])
async def test_a_loop_goes_on_when_postgres_is_back(own_postgres: PostgresServer, way: str) -> None:
    turns: asyncio.Queue[int] = asyncio.Queue()

    async def start(service: Service[Config]) -> None:
        pool = await service.open(open_pool(own_postgres.dsn(), role="", size_max=2))

        async def turn() -> None:
            turns.put_nowait(await pool.fetchval("SELECT 1"))

        service.every(0.05, turn)

    config = Config(postgres_dsn=own_postgres.dsn())
    async with serving(Service("sample", config), start):
        await asyncio.wait_for(turns.get(), SECONDS_MAX)
        getattr(own_postgres, way)()
        await asyncio.sleep(0.3)
        while not turns.empty():
            turns.get_nowait()
        own_postgres.start()

        assert await asyncio.wait_for(turns.get(), SECONDS_MAX) == 1


async def test_every_error_of_a_lost_connection_is_transient(own_postgres: PostgresServer) -> None:
    async with open_pool(own_postgres.dsn(), role="", size_max=1) as pool:
        async with pool.acquire() as conn:
            sleeping = asyncio.create_task(conn.execute("SELECT pg_sleep(60)"))
            await asyncio.sleep(0.1)
            own_postgres.kill()
            interrupted = (await asyncio.gather(sleeping, return_exceptions=True))[0]
            with pytest.raises(asyncpg.InterfaceError) as on_closed:
                await conn.execute("SELECT 1")
        refused = await failure_of(pool, "SELECT 1")

    for error in (interrupted, on_closed.value, refused):
        assert isinstance(error, Exception)
        assert is_transient(error), repr(error)


async def test_to_be_given_up_in_the_middle_of_a_transaction_is_transient(database: str) -> None:
    async def stand_still(conn: Connection) -> None:
        await conn.execute("SELECT 1")
        while not conn.is_closed():  # noqa: ASYNC110 - Postgres closes it
            await asyncio.sleep(0.02)
        await conn.execute("SELECT 1")

    brief = {"idle_in_transaction_session_timeout": "100"}
    async with open_pool(database, role="", size_max=1, settings=brief) as pool:
        async with pool.acquire() as conn:
            with pytest.raises(asyncpg.InterfaceError) as seen:
                await in_transaction(conn, stand_still)
        assert await pool.fetchval("SELECT 1") == 1

    said = asyncpg.exceptions.IdleInTransactionSessionTimeoutError("told by Postgres")
    assert is_transient(seen.value), repr(seen.value)
    assert is_transient(said)


async def test_a_pool_waits_for_a_postgres_that_is_still_starting(
    own_postgres: PostgresServer,
) -> None:
    own_postgres.stop()

    async def answer() -> int:
        async with open_pool(own_postgres.dsn(), role="", size_max=1) as pool:
            return int(await pool.fetchval("SELECT 1"))

    waiting = asyncio.create_task(answer())
    await asyncio.sleep(0.2)
    await asyncio.to_thread(own_postgres.start)

    assert await asyncio.wait_for(waiting, SECONDS_MAX) == 1


@pytest.mark.parametrize(
    ("statement", "arguments"),
    [
        ("SELECT nonsense", ()),
        ("SELECT $1::integer", ("not a number",)),
        ("SELECT 1 / 0", ()),
        ("INSERT INTO noetl.setting VALUES ('shard_count', '1')", ()),
    ],
)
async def test_the_error_of_a_wrong_statement_is_not_transient(
    pool: Pool, statement: str, arguments: tuple[object, ...]
) -> None:
    error = await failure_of(pool, statement, *arguments)

    assert not is_transient(error), repr(error)


def test_our_errors_say_themselves_whether_they_pass() -> None:
    assert is_transient(RetryableError("later"))
    assert not is_transient(RejectedError("never"))
    assert is_transient(ExceptionGroup("both", [OSError(), RetryableError("later")]))
    assert not is_transient(ExceptionGroup("one", [OSError(), KeyError()]))


def test_the_wait_grows_and_has_a_limit() -> None:
    waits = [backoff_seconds(failures) for failures in range(1, 100)]

    assert waits == sorted(waits)
    assert waits[0] < 1
    assert waits[-1] == BACKOFF_SECONDS_MAX
