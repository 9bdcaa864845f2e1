"""Questions in SQL: what is answered, and what cannot be reached by any trick."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from noetl_api_gateway.app import build_app
from noetl_api_gateway.endpoint import Gateway
from noetl_api_gateway.questions import QueryLimits, Questions
from noetl_core.domain.roles import ROLES, Role
from noetl_core.store import api_key
from noetl_core.store.postgres import Pool, open_pool
from services.api_gateway.conftest import Client
from support.black_hole import way_to

LIMITS = QueryLimits(seconds=30.0, rows_max=3)
BRIEF = replace(LIMITS, seconds=0.5)
"""For what is to be cut off: a busy machine may keep anything else waiting for as long."""


@pytest.fixture
async def query_pool(database: str) -> AsyncIterator[Pool]:
    async with open_pool(database, role="noetl_api_gateway", size_max=2, size_min=0) as opened:
        yield opened


@asynccontextmanager
async def answering(gateway: Gateway, pool: Pool, limits: QueryLimits) -> AsyncIterator[Client]:
    app = build_app(replace(gateway, questions=Questions(pool, limits)))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as opened:
        yield opened


@pytest.fixture
async def asking(gateway: Gateway, query_pool: Pool) -> AsyncIterator[Client]:
    async with answering(gateway, query_pool, LIMITS) as opened:
        yield opened


@pytest.fixture
async def asking_briefly(gateway: Gateway, query_pool: Pool) -> AsyncIterator[Client]:
    async with answering(gateway, query_pool, BRIEF) as opened:
        yield opened


async def a_key(pool: Pool, role: Role, *, days: int | None = None) -> dict[str, str]:
    """The header of somebody with that role."""
    key = f"key of a {role}"
    made = await api_key.create(
        pool, key_id=role, sha256=api_key.digest_of(key), name=role, role=role, days=days
    )
    assert made is not None
    return {"Authorization": f"Bearer {key}"}


async def ask(client: Client, query: str) -> tuple[int, dict[str, Any]]:
    answer = await client.post("/api/postgres/execute", json={"query": query})
    return answer.status_code, answer.json()


async def test_it_is_off_unless_it_is_turned_on(client: Client) -> None:
    status, problem = await ask(client, "SELECT 1")

    assert status == 403
    assert "NOETL_QUERY_ENABLED=true" in problem["detail"]


async def test_a_select_is_answered_row_by_row(asking: Client, pool: Pool) -> None:
    await pool.execute(
        "INSERT INTO noetl.runtime (runtime_id, kind, name) VALUES"
        " (1, 'server_api', 'server-local'), (2, 'worker_pool', 'worker-cpu')"
    )
    query = "SELECT kind, name, status FROM noetl.runtime ORDER BY kind, name;"

    status, body = await ask(asking, query)

    assert (status, body["status"]) == (200, "ok")
    assert body["columns"] == ["kind", "name", "status"]
    assert body["result"] == [
        ["server_api", "server-local", "ready"],
        ["worker_pool", "worker-cpu", "ready"],
    ]
    assert not body["truncated"]


async def test_names_are_looked_for_in_our_schema_first(asking: Client) -> None:
    assert (await ask(asking, "SELECT count(*) FROM runtime"))[1]["result"] == [[0]]


async def test_a_comment_at_the_end_does_no_harm(asking: Client) -> None:
    assert (await ask(asking, "SELECT 1 AS a, 2 AS a -- two"))[1]["result"] == [[1, 2]]


async def test_more_rows_than_allowed_are_cut_off_and_that_is_said(asking: Client) -> None:
    _, body = await ask(asking, "SELECT n FROM generate_series(1, 1000) AS n ORDER BY n")

    assert body["result"] == [[1], [2], [3]]
    assert body["truncated"]


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM noetl.runtime",
        "UPDATE noetl.runtime SET name = 'x' RETURNING name",
        "INSERT INTO noetl.audit (actor, action) VALUES ('a', 'b')",
        "WITH gone AS (DELETE FROM noetl.runtime RETURNING 1) SELECT * FROM gone",
        "CREATE TABLE noetl.mine (a int)",
        "SELECT 1; DELETE FROM noetl.runtime",
        "SELECT 1) AS asked (c1); DELETE FROM noetl.runtime; SELECT * FROM (SELECT 1",
        "SELECT pg_advisory_lock(1), * FROM noetl.commit_batch()",
        "SELECT $1::int",
        "SELECT",
        "BEGIN",
        "EXPLAIN ANALYZE DELETE FROM noetl.runtime",
        "COPY noetl.runtime TO STDOUT",
        "SELECT nextval('noetl.inbox_inbox_id_seq')",
        "DO $$ BEGIN PERFORM 1; END $$",
        "nonsense",
        "SELECT 1 / 0",
    ],
)
async def test_only_reading_is_possible(asking: Client, pool: Pool, query: str) -> None:
    await pool.execute("INSERT INTO noetl.runtime (runtime_id, kind, name) VALUES (1, 'k', 'n')")

    status, problem = await ask(asking, query)

    assert status == 422, problem
    assert await pool.fetchval("SELECT count(*) FROM noetl.runtime WHERE name = 'n'") == 1


READ = "query_to_xml('SELECT * FROM noetl.{table}', true, false, '')"
BECOME = "UPDATE pg_settings SET setting = ''noetl_worker'' WHERE name = ''role''"


@pytest.mark.parametrize("table", ["credential", "api_key"])
@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM noetl.{table}",
        f"SELECT {READ}",
        f"SELECT set_config('role', 'noetl_worker', true), {READ}",
        f"SELECT set_config('role', 'none', true), {READ}",
        f"SELECT set_config('session_authorization', 'postgres', true), {READ}",
        f"SELECT query_to_xml('{BECOME}', true, false, ''), {READ}",
    ],
)
async def test_secrets_stay_secret_whatever_the_query_does(
    asking: Client, table: str, query: str
) -> None:
    status, problem = await ask(asking, query.format(table=table))

    assert status == 422, problem
    reasons = ("permission denied", "cannot set parameter", "read-only transaction")
    assert any(reason in problem["detail"] for reason in reasons)


async def test_a_query_runs_as_the_role_for_queries(asking: Client) -> None:
    assert (await ask(asking, "SELECT current_user"))[1]["result"] == [["noetl_query"]]


async def test_it_may_not_take_long(asking_briefly: Client) -> None:
    status, problem = await ask(asking_briefly, "SELECT pg_sleep(30)")

    assert status == 422
    assert "longer than 0.5 s" in problem["detail"]


async def test_nothing_of_a_query_stays_in_the_session(asking: Client, pool: Pool) -> None:
    await ask(asking, "SELECT set_config('statement_timeout', '1', false)")

    for _ in range(12):
        assert (await ask(asking, "SELECT pg_sleep(0.01)"))[0] == 200


async def test_locks_of_a_question_end_with_it(asking: Client, pool: Pool) -> None:
    assert (await ask(asking, "SELECT pg_advisory_lock(77)"))[0] == 200

    assert not await pool.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")


@pytest.mark.parametrize(
    "query",
    [
        "SELECT cursor_to_xml('x', 1, true, true, '')",
        "SELECT most_common_vals FROM pg_stats WHERE schemaname = 'pg_catalog' LIMIT 1",
        "SELECT repeat('x', 1073741823)",
        "SELECT * FROM noetl.runtime FOR UPDATE",
        "SELECT xmlparse(document '<a')",
        "SELECT chr(0)",
        "SELECT ROW(1, 2)",
        "SELECT convert_from('\\xff', 'utf8')",
        "SELECT lo_create(0)",
        "SELECT jsonb_path_query('{}', '$.a[*] ? (')",
        "SELECT " + "(" * 5000 + "1" + ")" * 5000,
    ],
)
async def test_whatever_is_wrong_with_a_question_is_said_of_the_question(
    asking: Client, query: str
) -> None:
    status, problem = await ask(asking, query)

    assert status in (200, 422), problem


async def test_a_function_that_does_not_stop_is_left_to_itself(
    asking: Client, asking_briefly: Client
) -> None:
    begun = time.monotonic()

    status, problem = await ask(asking_briefly, "SELECT array_fill(1, ARRAY[250000000])")

    assert status == 422, problem
    assert time.monotonic() - begun < BRIEF.seconds + 3
    assert (await ask(asking, "SELECT 1"))[0] == 200


async def test_a_question_that_hears_of_no_cancel_is_left_to_itself(
    gateway: Gateway, database: str
) -> None:
    async with (
        way_to(database) as (dsn, way),
        open_pool(dsn, role="noetl_api_gateway", size_max=2, size_min=0) as pool,
        answering(gateway, pool, BRIEF) as client,
        answering(gateway, pool, LIMITS) as patient,
    ):
        assert (await ask(patient, "SELECT 1"))[0] == 200  # there is a connection from here on
        asked = asyncio.create_task(ask(client, "SELECT pg_sleep(30)"))
        await asyncio.sleep(BRIEF.seconds / 2)
        way.swallow()
        begun = time.monotonic()
        status, problem = await asked

        assert status == 422, problem
        assert time.monotonic() - begun < BRIEF.seconds + 3
        assert (await ask(patient, "SELECT 1"))[0] == 200


async def test_questions_that_take_long_keep_nobody_else_waiting(
    gateway: Gateway, query_pool: Pool
) -> None:
    limits = QueryLimits(seconds=4, rows_max=3, at_once=2)
    async with answering(gateway, query_pool, limits) as client:
        slow = [asyncio.create_task(ask(client, "SELECT pg_sleep(30)")) for _ in range(12)]
        await asyncio.sleep(0.3)
        begun = time.monotonic()
        ready = await client.get("/ready")
        waited = time.monotonic() - begun
        answers = [await one for one in slow]

        assert ready.status_code == 200
        assert waited < 1
        assert sorted(status for status, _ in answers) == [422] * 2 + [429] * 10
        assert (await ask(client, "SELECT 1"))[0] == 200


class TestKeys:
    async def test_without_keys_whoever_reaches_it_may_ask(self, asking: Client) -> None:
        assert (await ask(asking, "SELECT 1"))[0] == 200

    async def test_with_keys_one_is_asked_for_and_its_role_counts(
        self, asking: Client, pool: Pool
    ) -> None:
        keys = {role: await a_key(pool, role) for role in ROLES}
        headers = [
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic eDp5"},
            *keys.values(),
        ]

        answers = [
            await asking.post("/api/postgres/execute", json={"query": "SELECT 1"}, headers=one)
            for one in headers
        ]

        assert [one.status_code for one in answers] == [401, 401, 401, 403, 200, 200]
        assert answers[0].headers["www-authenticate"].startswith("Bearer")
        assert "has the role reader" in answers[3].json()["detail"]

    async def test_a_key_that_was_revoked_or_is_past_its_time_is_none(
        self, asking: Client, pool: Pool
    ) -> None:
        headers = [await a_key(pool, "admin"), await a_key(pool, "operator", days=1)]
        await api_key.revoke(pool, "admin")
        await pool.execute("UPDATE noetl.api_key SET expires_at = now() WHERE name = 'operator'")

        for header in (*headers, {}):
            answer = await asking.post(
                "/api/postgres/execute", json={"query": "SELECT 1"}, headers=header
            )
            assert answer.status_code == 401

    async def test_a_role_can_be_demanded_before_there_are_keys(
        self, gateway: Gateway, query_pool: Pool, pool: Pool
    ) -> None:
        limits = replace(LIMITS, role="reader")
        async with answering(gateway, query_pool, limits) as client:
            assert (await ask(client, "SELECT 1"))[0] == 401
            client.headers.update(await a_key(pool, "reader"))
            assert (await ask(client, "SELECT 1"))[0] == 200

    async def test_nothing_else_asks_for_a_key(self, asking: Client, pool: Pool) -> None:
        await a_key(pool, "admin")

        assert (await asking.get("/api/executions")).status_code == 200
