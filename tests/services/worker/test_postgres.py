"""SQL from playbooks against a real Postgres."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest

from noetl_worker.tools.postgres import PostgresTool, dsn_of
from services.worker import calls
from services.worker.desk import eventually


@pytest.fixture
async def tool() -> AsyncIterator[PostgresTool]:
    opened = PostgresTool()
    yield opened
    await opened.close()


async def query(tool: PostgresTool, dsn: str, sql: str, params: Any = None) -> Any:
    return await calls.data(tool, config={"auth": dsn, "command": sql, "params": params})


async def test_a_query_gives_rows_columns_and_counts(
    tool: PostgresTool, empty_database: str
) -> None:
    found = await query(
        tool, empty_database, "SELECT n, n * 2 AS twice FROM generate_series(1, 2) n"
    )

    assert found == {
        "rows": [{"n": 1, "twice": 2}, {"n": 2, "twice": 4}],
        "row_count": 2,
        "columns": ["n", "twice"],
        "statement_count": 1,
    }


async def test_it_says_how_many_connections_it_may_have_and_how_many_are_in_use(
    tool: PostgresTool, empty_database: str
) -> None:
    assert (tool.size, tool.busy) == (4, 0)

    sleeping = asyncio.create_task(
        calls.data(
            tool,
            config={"auth": empty_database, "command": "SELECT pg_sleep(0.3)", "pool": 7},
        )
    )
    await eventually(lambda: tool.busy)
    during = (tool.size, tool.busy)
    await sleeping

    assert during == (7, 1)
    assert (tool.size, tool.busy) == (7, 0)


async def test_several_statements_give_the_result_of_the_last(
    tool: PostgresTool, empty_database: str
) -> None:
    script = (
        "CREATE TABLE t (id int PRIMARY KEY, note text); -- one; two\n"
        "INSERT INTO t VALUES (1, 'a;b'), (2, $$c;d$$);"
        "UPDATE t SET note = upper(note)"
    )

    found = await query(tool, empty_database, script)

    assert found == {"rows": [], "row_count": 2, "columns": [], "statement_count": 3}
    assert (await query(tool, empty_database, "SELECT note FROM t ORDER BY id"))["rows"] == [
        {"note": "A;B"},
        {"note": "C;D"},
    ]


async def test_a_script_that_fails_leaves_nothing_behind(
    tool: PostgresTool, empty_database: str
) -> None:
    script = (
        "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1); INSERT INTO t VALUES (1)"
    )

    failed = await calls.error(tool, config={"auth": empty_database, "command": script})
    left = await query(tool, empty_database, "SELECT to_regclass('t')::text AS t")

    assert (failed.kind, failed.code) == ("db_constraint", "23505")
    assert failed.details["pg"] == {"sqlstate": "23505", "constraint": "t_pkey", "table": "t"}
    assert left["rows"] == [{"t": None}]


async def test_values_come_back_as_plain_data(tool: PostgresTool, empty_database: str) -> None:
    sql = """
    SELECT 12.50::numeric AS money, 3::numeric AS whole, 1e400::numeric AS huge, true AS yes,
           '2024-01-02T03:04:05Z'::timestamptz AS at, '2024-01-02'::date AS day,
           '0b9d9d7e-0000-0000-0000-000000000001'::uuid AS id, '{"a": [1]}'::jsonb AS doc,
           ARRAY[1, 2] AS list, '\\x00ff'::bytea AS raw, NULL AS nothing, '10.0.0.1'::inet AS ip,
           interval '1 day 2 hours' AS span, 'NaN'::float8 AS nan,
           12345678901234567890.123456789::numeric AS exact
    """

    (row,) = (await query(tool, empty_database, sql))["rows"]

    assert row == {
        "money": 12.5,
        "whole": 3,
        "huge": 10**400,
        "yes": True,
        "at": "2024-01-02T03:04:05+00:00",
        "day": "2024-01-02",
        "id": "0b9d9d7e-0000-0000-0000-000000000001",
        "doc": {"a": [1]},
        "list": [1, 2],
        "raw": "AP8=",
        "nothing": None,
        "ip": "10.0.0.1",
        "span": "P1DT7200S",
        "nan": "nan",
        "exact": "12345678901234567890.123456789",
    }


async def test_parameters_take_the_type_of_their_place(
    tool: PostgresTool, empty_database: str
) -> None:
    sql = (
        "SELECT $1::int AS n, $2::text AS t, $3::jsonb AS doc, $4::timestamptz AS at,"
        " $5::numeric AS m, $6::int[] AS list, $7::bool AS b, $8::uuid AS id, $9::text AS nothing"
    )
    params = [
        "7", 8, {"a": 1}, "2024-01-02T03:04:05+00:00", 1.5, ["1", 2], "yes",
        "0b9d9d7e-0000-0000-0000-000000000001", None,
    ]  # fmt: skip

    (row,) = (await query(tool, empty_database, sql, params))["rows"]

    assert row == {
        "n": 7,
        "t": "8",
        "doc": {"a": 1},
        "at": "2024-01-02T03:04:05+00:00",
        "m": 1.5,
        "list": [1, 2],
        "b": True,
        "id": "0b9d9d7e-0000-0000-0000-000000000001",
        "nothing": None,
    }


async def test_named_parameters_serve_every_statement(
    tool: PostgresTool, empty_database: str
) -> None:
    script = (
        "CREATE TABLE t (id int, x text); INSERT INTO t VALUES (:id, :x);"
        "SELECT * FROM t WHERE id = :id"
    )

    found = await query(tool, empty_database, script, {"id": 1, "x": "'; DROP TABLE t; --"})

    assert found["rows"] == [{"id": 1, "x": "'; DROP TABLE t; --"}]


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"command": " -- nothing"}, "`command` has no statement"),
        ({"command": "SELECT $1::int", "params": ["x"]}, "value 1 of statement 1 is no int4"),
        ({"command": "SELECT :a", "params": {"b": 1}}, "no value for the parameter 'a'"),
        ({"command": "SELECT 1", "params": 5}, "must be a list or a mapping"),
        ({"command": "SELECT 1", "pool": 0}, "from 1 to 100"),
    ],
)
async def test_a_wrong_field_is_named(
    tool: PostgresTool, empty_database: str, config: dict[str, Any], problem: str
) -> None:
    failed = await calls.error(tool, config={"auth": empty_database, **config})

    assert failed.kind == "client_error"
    assert problem in failed.message


async def test_errors_have_the_kind_that_rules_look_at(
    tool: PostgresTool, empty_database: str
) -> None:
    wrong = await calls.error(tool, config={"auth": empty_database, "command": "SELECT nope"})
    late = await calls.error(
        tool,
        config={
            "auth": empty_database,
            "command": "SET LOCAL statement_timeout = 50; SELECT pg_sleep(5)",
        },
    )
    away = await calls.error(
        tool, config={"auth": "postgresql://u:hunter2@127.0.0.1:1/x", "command": "SELECT 1"}
    )

    assert (wrong.kind, wrong.code, wrong.retryable) == ("client_error", "42703", False)
    assert (late.kind, late.retryable) == ("db_timeout", True)
    assert (away.kind, away.retryable) == ("connection", True)
    assert "hunter2" not in away.message


async def test_a_credential_is_a_dsn_or_its_parts(tool: PostgresTool, empty_database: str) -> None:
    parts = {"db_host": "127.0.0.1", "db_port": 5432, "db_name": "a b", "db_user": "u",
             "db_password": "p@ss/w"}  # fmt: skip

    found = await calls.data(
        tool,
        config={"auth": "pg", "query": "SELECT 1 AS one"},
        credentials={"pg": {"dsn": empty_database}},
    )

    assert found["rows"] == [{"one": 1}]
    assert dsn_of(parts) == "postgresql://u:p%40ss%2Fw@127.0.0.1:5432/a%20b"


async def test_what_cannot_run_in_a_transaction_still_runs_in_a_script(
    tool: PostgresTool, empty_database: str
) -> None:
    script = "CREATE TABLE t (id int); CREATE INDEX CONCURRENTLY i ON t (id); VACUUM t"

    assert (await query(tool, empty_database, script))["statement_count"] == 3


async def test_a_cancelled_query_gives_its_connection_back(
    tool: PostgresTool, empty_database: str
) -> None:
    one = {"auth": empty_database, "pool": 1}
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await calls.run(tool, config={**one, "command": "SELECT pg_sleep(30)"})

    assert (await calls.data(tool, config={**one, "command": "SELECT 1 AS n"}))["row_count"] == 1
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("before", ["", "SELECT 1; "], ids=["before the end", "before the commit"])
async def test_a_server_that_takes_its_leave_is_worth_a_retry(
    tool: PostgresTool, empty_database: str, before: str
) -> None:
    async with leaving_server(empty_database, after=b"last words") as dsn:
        command = f"{before}SELECT 'last ' || 'words'"
        failed = await calls.error(tool, config={"auth": dsn, "command": command})

    assert (failed.kind, failed.retryable) == ("connection", True)


# What every session says when the server's first process was killed, without being asked.
_LEAVE = b"SFATAL\0VFATAL\0C57P01\0Mterminating connection due to unexpected postmaster exit\0\0"


@asynccontextmanager
async def leaving_server(dsn: str, *, after: bytes) -> AsyncIterator[str]:
    """A relay to a real server that takes its leave after an answer, and does not hang up yet."""
    real = urlsplit(dsn)

    async def relay(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        server, to_server = await asyncio.open_connection(real.hostname, real.port)
        farewell = b"E" + (len(_LEAVE) + 4).to_bytes(4, "big") + _LEAVE

        async def pass_on(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, last: bytes
        ) -> None:
            while data := await reader.read(65536):
                writer.write(data + (last if after in data else b""))

        await asyncio.gather(pass_on(client, to_server, b""), pass_on(server, to_client, farewell))

    listener = await asyncio.start_server(relay, "127.0.0.1")
    port = listener.sockets[0].getsockname()[1]
    login = real.netloc.rpartition("@")[0]
    try:
        yield urlunsplit(real._replace(netloc=f"{login}@127.0.0.1:{port}"))
    finally:
        listener.close()
