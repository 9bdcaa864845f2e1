"""store/postgres.py: what a schema that changes under a running service does to its statements."""

import asyncio

import asyncpg
import pytest

from noetl_core.store.postgres import (
    Connection,
    Pool,
    in_transaction,
    is_postgres_away,
    is_schema_wrong,
    open_pool,
)

READ = "SELECT version FROM noetl.catalog"
WIDEN = "ALTER TABLE noetl.catalog ALTER COLUMN version TYPE bigint"
NOTE = "INSERT INTO noetl.audit (actor, action) VALUES ('test', 'noted')"


_SLEEPS = """
SELECT EXISTS (
    SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'
)
"""


async def failure_of(pool: Pool, statement: str) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is what we ask
        await pool.execute(statement)
    return caught.value


async def test_a_statement_outside_a_transaction_does_not_notice(pool: Pool, database: str) -> None:
    async with open_pool(database, role="noetl_api_gateway", size_max=1) as service:
        await service.fetch(READ)
        await pool.execute(WIDEN)

        assert await service.fetch(READ) == []


async def test_a_transaction_with_an_outdated_plan_is_done_again_and_counts_once(
    pool: Pool, database: str
) -> None:
    begun = 0

    async def work(conn: Connection) -> None:
        nonlocal begun
        begun += 1
        await conn.execute(NOTE)
        await conn.fetch(READ)

    async with (
        open_pool(database, role="noetl_api_gateway", size_max=1) as service,
        service.acquire() as conn,
    ):
        await conn.fetch(READ)
        await pool.execute(WIDEN)

        await in_transaction(conn, work)

    assert begun == 2, "its plan was not outdated: this has shown nothing"
    assert await pool.fetchval("SELECT count(*) FROM noetl.audit") == 1


async def test_an_outdated_plan_in_any_other_transaction_is_transient(pool: Pool) -> None:
    async with pool.acquire() as conn:
        await conn.fetch(READ)
        await pool.execute(WIDEN)
        with pytest.raises(asyncpg.PostgresError) as caught:
            async with conn.transaction():
                await conn.fetch(READ)

    assert is_postgres_away(caught.value), repr(caught.value)


async def test_a_function_that_is_replaced_between_plan_and_call_is_transient(pool: Pool) -> None:
    # It learns what others have changed when it opens another table.
    look = "PERFORM pg_sleep(3); EXECUTE 'SELECT FROM noetl.timer'; RETURN 1;"
    for name, body in (("slow", look), ("sample", "RETURN 1;")):
        await pool.execute(
            f"CREATE FUNCTION noetl.{name}() RETURNS integer LANGUAGE plpgsql"
            f" AS $$ BEGIN {body} END $$"
        )
    asked = asyncio.create_task(
        failure_of(pool, "SELECT noetl.sample() FROM (SELECT noetl.slow() OFFSET 0) AS s")
    )
    async with asyncio.timeout(60):
        while not await pool.fetchval(_SLEEPS):  # noqa: ASYNC110 - Postgres does not call us
            await asyncio.sleep(0.02)
    await pool.execute("DROP FUNCTION noetl.sample")

    error = await asked

    assert "cache lookup failed" in str(error)
    assert is_postgres_away(error)


async def test_a_lock_that_was_not_to_be_had_is_transient(pool: Pool) -> None:
    async with pool.acquire() as holder, holder.transaction():
        await holder.execute("LOCK TABLE noetl.setting")
        error = await failure_of(pool, "SET lock_timeout = '50ms'; SELECT * FROM noetl.setting")

    assert is_postgres_away(error), repr(error)


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT nothing FROM noetl.catalog",
        "SELECT 1 FROM noetl.nothing",
        "SELECT noetl.nothing(1)",
        "SET ROLE noetl_worker; DELETE FROM noetl.event",
    ],
)
async def test_a_statement_that_does_not_fit_the_schema_is_told_from_wrong_data(
    pool: Pool, statement: str
) -> None:
    error = await failure_of(pool, statement)

    assert is_schema_wrong(error)
    assert not is_postgres_away(error)


@pytest.mark.parametrize("statement", ["SELECT 1 / 0", "SELECT 'a'::integer", "SELECT '{'::jsonb"])
async def test_wrong_data_is_not_a_wrong_schema(pool: Pool, statement: str) -> None:
    assert not is_schema_wrong(await failure_of(pool, statement))
