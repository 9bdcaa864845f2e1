"""A database of an older release is brought to this version, with work in it and in use."""

import asyncio
import hashlib
import re
import subprocess
from pathlib import Path

import asyncpg
import pytest

from chaos.stack import NOETL, running_stack
from noetl_core.domain.ids import ExecutionId
from noetl_core.store import execution_shard
from noetl_core.store.migration_file import migrations_directory
from noetl_core.store.migration_status import status
from noetl_core.store.migrations import schema_dump
from noetl_core.store.postgres import Pool, open_pool
from services.broker.desk import Desk
from support.postgres import PostgresServer

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(900)]

FILES = sorted(migrations_directory().glob("*.sql"))
OLDER = [file for file in FILES if file.name[:4] <= "0008"]
NEWER = [file.name for file in FILES if file not in OLDER]
SCHEMA = Path(__file__).parents[2] / "schema" / "schema.sql"

CALLS = 22
PLAYBOOK = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: upgrade}
workflow:
  - step: first
    tool: {kind: noop}
    next: {arcs: [{step: each}]}
  - step: each
    loop: {in: "{{ range(20) | list }}", iterator: item, spec: {max_in_flight: 5}}
    tool: {kind: noop}
    next: {arcs: [{step: last}]}
  - step: last
    tool: {kind: noop}
"""

# As a release did it that knew nothing of statements.
RECORDS = """
CREATE SCHEMA IF NOT EXISTS noetl;
CREATE TABLE IF NOT EXISTS noetl.schema_migration (
    name        text PRIMARY KEY,
    sha256      text NOT NULL,
    applied_at  timestamptz NOT NULL DEFAULT now()
);
"""
RECORD = "INSERT INTO noetl.schema_migration (name, sha256) VALUES ($1, $2)"

DIGEST = """
SELECT md5(string_agg(e::text, '' ORDER BY event_id)) FROM (
    SELECT execution_id, event_id, event_key, event_type, context, result FROM noetl.event
    WHERE execution_id = $1
) AS e
"""


@pytest.fixture
async def older(own_postgres: PostgresServer) -> str:
    """The DSN of a database of the older release."""
    conn = await asyncpg.connect(own_postgres.dsn())
    await conn.execute(RECORDS)
    for file in OLDER:
        text = file.read_text()
        async with conn.transaction():
            await conn.execute(text)
            await conn.execute(RECORD, file.name, hashlib.sha256(text.encode()).hexdigest())
    await conn.close()
    return own_postgres.dsn()


async def upgrade(dsn: str) -> list[str]:
    command = [str(NOETL), "db", "migrate", "--dsn", dsn]
    told = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=False, timeout=120
    )
    print(told.stderr)
    assert told.returncode == 0, told.stderr
    return str(told.stdout).splitlines()


async def calls_of(pool: Pool, execution_id: ExecutionId) -> int:
    sql = "SELECT count(*) FROM noetl.event WHERE execution_id = $1 AND event_type = 'call.done'"
    return int(await pool.fetchval(sql, execution_id))


async def test_connections_of_before_work_on_while_the_schema_is_brought_up_to_date(
    older: str,
) -> None:
    async with open_pool(older, role="", size_max=4) as pool:
        desk = Desk(pool)
        await desk.claim(lease_seconds=600)
        done = await desk.start(PLAYBOOK)
        await desk.run()
        before = await pool.fetchval(DIGEST, done)
        executions = [await desk.start(PLAYBOOK) for _ in range(5)]

        upgrading = asyncio.create_task(upgrade(older))
        while not upgrading.done():
            executions.append(await desk.start(PLAYBOOK))
            await desk.run()
        assert await upgrading == NEWER
        executions.append(await desk.start(PLAYBOOK))
        await desk.run()

        print(f"{len(executions)} executions went on meanwhile")
        for execution_id in executions:
            assert (await desk.types(execution_id))[-1] == "execution.completed"
            assert await calls_of(pool, execution_id) == CALLS
        assert await pool.fetchval(DIGEST, done) == before
        assert await pool.fetchval("SELECT count(*) FROM noetl.dead_letter") == 0
        assert {state.standing for state in await status(pool)} == {"applied"}


async def test_an_upgraded_database_has_the_schema_of_a_new_one(older: str) -> None:
    await upgrade(older)

    upgraded = await asyncio.to_thread(schema_dump, older)
    assert _comparable(upgraded) == _comparable(SCHEMA.read_text())


def _comparable(dump: str) -> list[str]:
    """Rights are listed in the order in which they were given. Who was given all tables at that
    time has one more in a new database, which everybody may read anyway."""
    given_before = re.compile(
        r"GRANT SELECT ON TABLE noetl\.schema_migration_statement TO noetl_.+"
    )
    return sorted(line for line in dump.splitlines() if not given_before.fullmatch(line))


async def test_the_services_go_on_with_what_an_older_release_has_begun(
    older: str, tmp_path: Path
) -> None:
    async with open_pool(older, role="", size_max=4) as pool:
        desk = Desk(pool)
        await desk.claim(lease_seconds=600)
        executions = [await desk.start(PLAYBOOK) for _ in range(10)]
        await execution_shard.release(pool, "broker", desk.owner, list(desk.claims))

        with running_stack(tmp_path / "stack", "--processes", "--postgres", older) as stack:
            for execution_id in executions:
                assert await stack.until_ended(execution_id) == "execution.completed"
                await stack.until_projected(execution_id, "COMPLETED")
                assert await calls_of(pool, execution_id) == CALLS
            assert {state.standing for state in await status(pool)} == {"applied"}
