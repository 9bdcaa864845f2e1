"""store/migrations.py: forward only, each file once, and schema.sql is what they make."""

import asyncio
import shutil
from pathlib import Path

import asyncpg
import pytest

from noetl_core.domain.ids import ExecutionId
from noetl_core.domain.sharding import vnode_of
from noetl_core.store.migration_file import migrations_directory
from noetl_core.store.migrations import (
    MigrationChangedError,
    MigrationFailedError,
    migrate,
    schema_dump,
)
from noetl_core.store.postgres import Pool

SCHEMA = Path(__file__).parents[2] / "schema" / "schema.sql"
NAMES = sorted(file.name for file in migrations_directory().glob("*.sql"))


async def test_migrating_twice_applies_each_file_once(empty_database: str) -> None:
    conn = await asyncpg.connect(empty_database)

    first, second = await migrate(conn), await migrate(conn)
    await conn.close()

    assert first == NAMES
    assert second == []


async def test_two_that_migrate_at_once_do_not_disturb_each_other(empty_database: str) -> None:
    conns = [await asyncpg.connect(empty_database) for _ in range(2)]

    answers = await asyncio.gather(*(migrate(conn) for conn in conns))
    for conn in conns:
        await conn.close()

    assert sorted(answers) == [[], NAMES]


async def test_who_is_no_superuser_may_migrate_and_locks_stay_as_they_were(
    empty_database: str, template_database: str
) -> None:
    """As on a managed Postgres: the functions of Postgres belong to somebody else."""
    assert template_database, "the roles of the cluster are there"
    root = await asyncpg.connect(empty_database)
    await root.execute("CREATE ROLE owner LOGIN CREATEROLE")
    try:
        roles = await root.fetch("SELECT rolname FROM pg_roles WHERE rolname LIKE 'noetl%'")
        for row in roles:
            await root.execute(f"GRANT {row['rolname']} TO owner WITH ADMIN OPTION")
        name = await root.fetchval("SELECT current_database()")
        await root.execute(f'ALTER DATABASE "{name}" OWNER TO owner')
        conn = await asyncpg.connect(empty_database.replace("postgres@", "owner@"))
        try:
            assert await migrate(conn) == NAMES
            assert await conn.fetchval(
                "SELECT has_function_privilege('noetl_query', 'pg_advisory_lock(int8)', 'EXECUTE')"
            )
        finally:
            await conn.close()
    finally:
        await root.execute("REASSIGN OWNED BY owner TO postgres; DROP OWNED BY owner")
        await root.execute("DROP ROLE owner")
        await root.close()


async def test_a_file_that_changed_after_it_was_applied_is_an_error(
    empty_database: str, tmp_path: Path
) -> None:
    directory = shutil.copytree(migrations_directory(), tmp_path / "migrations")
    conn = await asyncpg.connect(empty_database)
    await migrate(conn, directory=directory)
    (directory / NAMES[0]).write_text("SELECT 1")

    with pytest.raises(MigrationChangedError, match=NAMES[0]):
        await migrate(conn, directory=directory)
    await conn.close()


async def test_a_migration_that_fails_leaves_nothing_of_itself(
    empty_database: str, tmp_path: Path
) -> None:
    (tmp_path / "0001_half.sql").write_text("CREATE TABLE noetl.half (); SELECT 1 / 0;")
    conn = await asyncpg.connect(empty_database)

    with pytest.raises(MigrationFailedError, match="statement 2 of 2") as caught:
        await migrate(conn, directory=tmp_path)

    assert isinstance(caught.value.__cause__, asyncpg.DivisionByZeroError)
    assert await conn.fetchval("SELECT to_regclass('noetl.half')") is None
    assert await conn.fetchval("SELECT count(*) FROM noetl.schema_migration") == 0
    await conn.close()


async def test_schema_sql_is_what_the_migrations_make(database: str) -> None:
    assert schema_dump(database) == SCHEMA.read_text(), "run ./task db:dump"


async def test_the_vnode_is_the_same_in_sql_and_in_python(pool: Pool) -> None:
    ids = [0, 1, 2**31, 2**32 + 7, 2**62 - 1, 2**63 - 1, *range(10**15, 10**15 + 500)]

    rows = await pool.fetch("SELECT id, noetl.vnode(id) FROM unnest($1::bigint[]) AS id", ids)

    assert {row["id"]: row["vnode"] for row in rows} == {i: vnode_of(ExecutionId(i)) for i in ids}
