"""Questions in SQL: what is answered, and what cannot be reached by any trick."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from noetl_api_gateway.app import build_app
from noetl_api_gateway.endpoint import Gateway, QueryLimits
from noetl_core.store.postgres import Pool
from services.api_gateway.conftest import Client

LIMITS = QueryLimits(seconds=0.5, rows_max=3)


@pytest.fixture
async def asking(gateway: Gateway) -> AsyncIterator[Client]:
    app = build_app(replace(gateway, query_limits=LIMITS))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as opened:
        yield opened


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


async def test_it_may_not_take_long(asking: Client) -> None:
    status, problem = await ask(asking, "SELECT pg_sleep(30)")

    assert status == 422
    assert "longer than 0.5 s" in problem["detail"]


async def test_nothing_of_a_query_stays_in_the_session(asking: Client, pool: Pool) -> None:
    await ask(asking, "SELECT pg_advisory_lock(77), set_config('statement_timeout', '1', false)")

    assert await pool.fetchval("SELECT pg_try_advisory_lock(77)")
    for _ in range(12):
        assert (await ask(asking, "SELECT pg_sleep(0.01)"))[0] == 200
