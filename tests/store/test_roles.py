"""schema/migrations/0003: each service may do its own work, and the log has one kind of writer."""

import asyncpg
import pytest

from noetl_core.store.postgres import Pool, open_pool

ROLES = (
    "noetl_api_gateway",
    "noetl_broker",
    "noetl_worker",
    "noetl_projection",
    "noetl_shard_manager",
    "noetl_checkpointer",
    "noetl_compactor",
    "noetl_reaper",
)
QUERY_ROLE = "noetl_query"
"""Nobody's: whoever asks in SQL reads as it (tests/services/api_gateway/test_sql_api.py)."""

INSERT = (
    "INSERT INTO noetl.event (execution_id, event_id, event_key, shard_id, event_type)"
    " VALUES (1, 1, 'k', 0, 'step.enter')"
)
CHANGES = (
    "UPDATE noetl.event SET event_type = 'other'",
    "DELETE FROM noetl.event",
    "TRUNCATE noetl.event",
    "UPDATE noetl.event_default SET event_type = 'other'",
    "DELETE FROM noetl.event_default",
)


async def attempt(pool: Pool, role: str, statement: str) -> None:
    """Run it as that role, and undo it."""
    async with pool.acquire() as conn:
        transaction = conn.transaction()
        await transaction.start()
        try:
            await conn.execute(f"SET LOCAL ROLE {role}")
            await conn.execute(statement)
        finally:
            await transaction.rollback()


async def test_every_role_of_the_cluster_is_tested_here(pool: Pool) -> None:
    rows = await pool.fetch("SELECT rolname FROM pg_roles WHERE rolname LIKE 'noetl%'")

    assert {row["rolname"] for row in rows} == {*ROLES, QUERY_ROLE}


async def test_the_broker_may_append_to_the_log(pool: Pool) -> None:
    await attempt(pool, "noetl_broker", INSERT)


@pytest.mark.parametrize("role", [role for role in ROLES if role != "noetl_broker"])
async def test_nobody_but_the_broker_may_append_to_the_log(pool: Pool, role: str) -> None:
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await attempt(pool, role, INSERT)


@pytest.mark.parametrize("role", ROLES)
async def test_nobody_may_change_what_is_in_the_log(pool: Pool, role: str) -> None:
    for change in CHANGES:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await attempt(pool, role, change)


@pytest.mark.parametrize("role", ROLES)
async def test_every_service_may_register_and_stand_for_a_role(pool: Pool, role: str) -> None:
    await attempt(
        pool, role, "INSERT INTO noetl.runtime (runtime_id, name, kind) VALUES (1, 'a', 'b')"
    )
    await attempt(pool, role, "INSERT INTO noetl.leader (role) VALUES ('reaper')")
    await attempt(pool, role, "SELECT value FROM noetl.setting")


@pytest.mark.parametrize("role", ROLES)
async def test_no_service_may_change_the_audit(pool: Pool, role: str) -> None:
    await attempt(pool, role, "INSERT INTO noetl.audit (actor, action) VALUES ('a', 'b')")
    for change in ("UPDATE noetl.audit SET actor = 'x'", "DELETE FROM noetl.audit"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await attempt(pool, role, change)


@pytest.mark.parametrize("role", ["noetl_broker", "noetl_projection", "noetl_reaper"])
async def test_only_the_worker_and_the_gateway_see_credentials(pool: Pool, role: str) -> None:
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await attempt(pool, role, "SELECT * FROM noetl.credential")


@pytest.mark.parametrize("table", ["credential", "api_key"])
async def test_questions_in_sql_see_no_secrets_and_change_nothing(pool: Pool, table: str) -> None:
    await attempt(pool, QUERY_ROLE, "SELECT * FROM noetl.runtime")
    for statement in (f"SELECT * FROM noetl.{table}", INSERT, *CHANGES):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await attempt(pool, QUERY_ROLE, statement)


async def test_a_pool_acts_as_its_role_even_after_a_session_was_given_back(database: str) -> None:
    async with open_pool(database, role="noetl_worker", size_max=1) as pool:
        users = [await pool.fetchval("SELECT current_user") for _ in range(3)]

    assert users == ["noetl_worker"] * 3


async def test_a_user_who_is_a_member_of_the_roles_may_open_pools_as_them(
    pool: Pool, database: str
) -> None:
    await pool.execute("CREATE ROLE noetl LOGIN")
    try:
        await pool.execute(f"GRANT {', '.join(ROLES)} TO noetl")
        dsn = database.replace("postgres@", "noetl@")
        async with open_pool(dsn, role="noetl_broker", size_max=1) as opened:
            assert await opened.fetchval("SELECT current_user") == "noetl_broker"
    finally:
        await pool.execute("DROP ROLE noetl")
