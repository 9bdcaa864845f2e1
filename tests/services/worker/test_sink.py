"""Sinks into a real database: what a command returns is written once, whatever happens to it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import duckdb
import msgspec
import pytest

from noetl_core.blob import ResultStore
from noetl_core.domain.brief import Brief, encode_brief
from noetl_core.domain.errors import ToolError
from noetl_core.domain.ids import CatalogId, CommandId, ShardId, StepName, WorkerId
from noetl_core.store.command import Leased
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Done, Failed
from noetl_worker.children.pool import ChildPool
from noetl_worker.credentials import Credentials
from noetl_worker.perform import Performer
from noetl_worker.plan import Plans
from noetl_worker.sink import Sinks
from noetl_worker.tools.duckdb import DuckdbTool
from noetl_worker.tools.duckdb_session import Settings
from noetl_worker.tools.http import HttpTool
from noetl_worker.tools.noop import NoopTool
from noetl_worker.tools.postgres import PostgresTool
from noetl_worker.tools.python import PythonTool
from noetl_worker.tools.registry import Registry, closing
from services.worker import desk
from services.worker.desk import EXECUTION, playbook, register

LEDGER = "SELECT idempotency_key, step, row_count FROM noetl_sink_ledger ORDER BY 1"


class Target:
    """The database that sinks write into."""

    def __init__(self, conn: "asyncpg.Connection[asyncpg.Record]", dsn: str) -> None:
        self.conn = conn
        self.dsn = dsn

    async def rows(self, sql: str = "SELECT * FROM t ORDER BY 1") -> list[tuple[Any, ...]]:
        return [tuple(row) for row in await self.conn.fetch(sql)]

    async def has_ledger(self) -> bool:
        return await self.conn.fetchval("SELECT to_regclass('noetl_sink_ledger')") is not None


@pytest.fixture
async def target(empty_database: str) -> AsyncIterator[Target]:
    conn = await asyncpg.connect(empty_database)
    await conn.execute("CREATE TABLE t (id int PRIMARY KEY, note text, at timestamptz, doc jsonb)")
    yield Target(conn, empty_database)
    await conn.close()


class Worker:
    """Performs commands of the step `a`, with everything that a worker has for it."""

    def __init__(self, pool: Pool, tools: Registry) -> None:
        self._pool = pool
        self._performer = Performer(
            pool,
            worker_id=WorkerId("w"),
            plans=Plans(pool),
            results=ResultStore(),
            tools=tools,
            credentials=Credentials(pool, None),
            sink=Sinks(tools),
        )

    async def perform(self, command: str = "a.1#1", **brief: Any) -> Done | Failed:
        end = await self._performer.perform(_leased(command, **brief))
        assert isinstance(end, Done | Failed), end
        return end

    async def done(self, command: str = "a.1#1", **brief: Any) -> None:
        end = await self.perform(command, **brief)
        assert isinstance(end, Done), end

    async def error(self, command: str = "a.1#1", **brief: Any) -> ToolError:
        end = await self.perform(command, **brief)
        assert isinstance(end, Failed), end
        return end.error


def _leased(command: str, **fields: Any) -> Leased:
    brief = Brief(catalog_id=CatalogId(1), step=StepName("a"), visit=1, attempt=1, **fields)
    payload = encode_brief(brief)
    return Leased(EXECUTION, CommandId(command), ShardId(0), StepName("a"), 1, "cpu", payload)


@asynccontextmanager
async def working(pool: Pool) -> AsyncIterator[Worker]:
    settings = Settings(memory_mb=128, threads=1)
    tools = Registry(
        [
            NoopTool(),
            PostgresTool(),
            HttpTool(),
            DuckdbTool(settings, calls_max=2),
            PythonTool(ChildPool(size=1, memory_mb=512, cpu_seconds=60)),
        ]
    )
    async with closing(tools):
        yield Worker(pool, tools)


@pytest.fixture
async def worker(pool: Pool) -> AsyncIterator[Worker]:
    async with working(pool) as opened:
        yield opened


async def step(pool: Pool, value: Any, sink: dict[str, Any], **fields: Any) -> None:
    """Registers a playbook whose step `a` returns the value and has the sink."""
    document = {"step": "a", "tool": {"kind": "noop", "value": value}, "sink": sink, **fields}
    await pool.execute("DELETE FROM noetl.catalog")
    await register(pool, playbook("- " + msgspec.json.encode(document).decode()))


def into(target: Target, **fields: Any) -> dict[str, Any]:
    return {"tool": "postgres", "auth": target.dsn, "table": "t", **fields}


async def test_a_sink_that_runs_again_with_its_key_writes_once(
    worker: Worker, pool: Pool, target: Target
) -> None:
    await step(pool, [{"id": 1, "note": "x"}, {"id": 2, "note": "y"}], into(target))

    await worker.done("a.1#1")
    await worker.done("a.1#2")

    assert await target.rows("SELECT id, note FROM t ORDER BY 1") == [(1, "x"), (2, "y")]
    assert await target.rows(LEDGER) == [(f"{EXECUTION}:a.1", "a", 2)]


async def test_two_pages_write_both(worker: Worker, pool: Pool, target: Target) -> None:
    sink = into(target, args={"id": "{{ input.id }}"})
    await step(pool, 0, sink, input={"id": 0})

    await worker.done("a.1#1", input={"id": 1})
    await worker.done("a.1@2#1", input={"id": 2}, page=2)

    assert await target.rows("SELECT id FROM t ORDER BY 1") == [(1,), (2,)]
    assert [key for key, *_ in await target.rows(LEDGER)] == [
        f"{EXECUTION}:a.1",
        f"{EXECUTION}:a.1@2",
    ]


async def test_a_worker_that_dies_before_the_commit_leaves_nothing_behind(
    worker: Worker, pool: Pool, target: Target
) -> None:
    await step(pool, {"id": 1}, into(target))
    await worker.done("a.1/0#1")  # the ledger exists, so that the next waits for the table
    await target.conn.execute("DELETE FROM t")
    async with target.conn.transaction():
        await target.conn.execute("LOCK TABLE t")
        dying = asyncio.create_task(worker.perform("a.1#1"))
        await _until_waiting(target)
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)

    assert await target.rows("SELECT id FROM t") == []
    assert [key for key, *_ in await target.rows(LEDGER)] == [f"{EXECUTION}:a.1/0"]

    await worker.done("a.1#2")

    assert await target.rows("SELECT id FROM t") == [(1,)]


async def _until_waiting(target: Target) -> None:
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 't'::regclass"
    async with asyncio.timeout(60):
        while not await target.conn.fetchval(waiting):  # noqa: ASYNC110 - it is in another process
            await asyncio.sleep(0.01)


async def test_workers_with_the_same_key_at_once_write_once(pool: Pool, target: Target) -> None:
    await step(pool, [{"id": 1}, {"id": 2}], into(target))
    async with working(pool) as first, working(pool) as second:
        attempts = [w.done(f"a.1#{n}") for n in range(4) for w in (first, second)]

        await asyncio.gather(*attempts)

    assert await target.rows("SELECT id FROM t ORDER BY 1") == [(1,), (2,)]
    assert await target.rows(LEDGER) == [(f"{EXECUTION}:a.1", "a", 2)]


async def test_a_row_that_is_refused_takes_the_others_and_the_ledger_row_with_it(
    worker: Worker, pool: Pool, target: Target
) -> None:
    await step(pool, [{"id": 1}, {"id": 1}], into(target))

    error = await worker.error()

    assert (error.kind, error.code) == ("db_constraint", "23505")
    assert error.message.startswith("sink: ")
    assert await target.rows() == []
    assert await target.rows(LEDGER) == []


async def test_a_column_that_is_not_there_is_named_with_those_that_are(
    worker: Worker, pool: Pool, target: Target
) -> None:
    await step(pool, {"id": 1, "nte": "x"}, into(target))

    error = await worker.error()

    assert error.code == "UNKNOWN_COLUMN"
    assert error.message == "sink: table 't' has no column 'nte'; it has id, note, at, doc"


async def test_values_take_the_types_of_their_columns(
    worker: Worker, pool: Pool, target: Target
) -> None:
    row = {"id": "7", "note": {"a": 1}, "at": "2024-01-02T03:04:05Z", "doc": [1, "x", None]}
    await step(pool, row, into(target))

    await worker.done()

    sql = "SELECT id, note, at = '2024-01-02 03:04:05+00', doc::text FROM t"
    assert await target.rows(sql) == [(7, '{"a": 1}', True, '[1, "x", null]')]


async def test_a_column_that_a_row_does_not_name_gets_its_default(
    worker: Worker, pool: Pool, target: Target
) -> None:
    await target.conn.execute("ALTER TABLE t ALTER note SET DEFAULT 'none'")
    await step(pool, [{"id": 1}, {"note": "x", "id": 2}, {"id": 3, "note": None}], into(target))

    await worker.done()

    rows = await target.rows("SELECT id, note FROM t ORDER BY 1")
    assert rows == [(1, "none"), (2, "x"), (3, None)]


async def test_upsert_changes_what_the_row_names_and_nothing_else(
    worker: Worker, pool: Pool, target: Target
) -> None:
    await target.conn.execute("INSERT INTO t (id, note, doc) VALUES (1, 'old', '1'), (3, 'z', '3')")
    rows = [{"id": 1, "note": "new"}, {"id": 2, "note": "a"}, {"id": 2, "note": "b"}]
    await step(pool, rows, into(target, mode="upsert", key=["id"]))

    await worker.done()

    found = await target.rows("SELECT id, note, doc::text FROM t ORDER BY 1")
    assert found == [(1, "new", "1"), (2, "b", None), (3, "z", "3")]


async def test_a_row_without_its_key_is_refused(worker: Worker, pool: Pool, target: Target) -> None:
    await step(pool, [{"id": 1}, {"note": "x"}], into(target, mode="upsert", key=["id"]))

    error = await worker.error()

    assert error.message == "sink: `key` is 'id', but row 2 has no value for it"


async def test_replace_takes_away_the_rows_with_the_same_key(
    worker: Worker, pool: Pool, target: Target
) -> None:
    await target.conn.execute("INSERT INTO t (id, note) VALUES (1, 'a'), (2, 'a'), (3, 'b')")
    sink = into(target, mode="replace", key=["note"])
    await step(pool, [{"id": 2, "note": "a"}, {"id": 4, "note": "a"}], sink)

    await worker.done()

    found = await target.rows("SELECT id, note FROM t ORDER BY 1")
    assert found == [(2, "a"), (3, "b"), (4, "a")]


async def test_replace_without_a_key_takes_away_everything(
    worker: Worker, pool: Pool, target: Target
) -> None:
    await target.conn.execute("INSERT INTO t (id) VALUES (1), (2)")
    await step(pool, [{"id": 2}], into(target, mode="replace"))

    await worker.done()

    assert await target.rows("SELECT id FROM t") == [(2,)]


async def test_a_table_in_a_schema_with_odd_names_is_found(
    worker: Worker, pool: Pool, target: Target
) -> None:
    await target.conn.execute('CREATE SCHEMA "My"; CREATE TABLE "My"."odd table" ("a b" int)')
    await step(pool, {"a b": 1}, into(target, table="My.odd table"))

    await worker.done()

    assert await target.rows('SELECT "a b" FROM "My"."odd table"') == [(1,)]


async def test_large_results_are_written_in_several_statements_of_one_transaction(
    worker: Worker, pool: Pool, target: Target
) -> None:
    code = "result = [{'id': n, 'note': 'x' * 1000} for n in range(6000)]"
    await step(pool, 0, into(target), tool={"kind": "python", "code": code})

    await worker.done("a.1#1")
    await worker.done("a.1#2")

    assert await target.rows("SELECT count(*), sum(length(note)) FROM t") == [(6000, 6_000_000)]
    assert await target.rows("SELECT count(DISTINCT xmin::text) FROM t") == [(1,)]


async def test_a_statement_runs_with_its_args_in_the_transaction_of_the_ledger(
    worker: Worker, pool: Pool, target: Target
) -> None:
    sink = {
        "tool": "postgres",
        "auth": target.dsn,
        "command": "INSERT INTO t (id, note) VALUES (:id, :note)",
        "args": "{{ output.data }}",
    }
    await step(pool, [{"id": 1, "note": "x"}, {"id": 2, "note": "y"}], sink)

    await worker.done("a.1#1")
    await worker.done("a.1#2")

    assert await target.rows("SELECT id, note FROM t ORDER BY 1") == [(1, "x"), (2, "y")]
    assert await target.rows(LEDGER) == [(f"{EXECUTION}:a.1", "a", 2)]


async def test_a_statement_cannot_commit_behind_the_ledgers_back(
    worker: Worker, pool: Pool, target: Target
) -> None:
    sink = {"tool": "postgres", "auth": target.dsn, "command": "DELETE FROM t; COMMIT"}
    await step(pool, 0, sink)

    error = await worker.error()

    assert error.code == "WRONG_FIELD"
    assert not await target.has_ledger()


async def test_no_rows_leave_the_key_free_for_an_attempt_that_finds_some(
    worker: Worker, pool: Pool, target: Target
) -> None:
    await step(pool, [], into(target, args="{{ input.rows }}"), input={"rows": []})

    await worker.done("a.1#1", input={"rows": []})
    await worker.done("a.1#2", input={"rows": [{"id": 1}]})

    assert await target.rows("SELECT id FROM t") == [(1,)]


@pytest.mark.parametrize(
    ("value", "merge_path"),
    [
        ({"rows": [{"id": 1}], "row_count": 1}, None),
        ({"status_code": 200, "data": [{"id": 1}]}, None),
        ({"status_code": 200, "data": {"id": 1}}, None),
        ({"status_code": 200, "data": {"items": [{"id": 1}], "more": False}}, "items"),
        ({"items": [{"id": 1}], "more": False}, "items"),
    ],
)
async def test_without_args_the_rows_are_those_of_the_result(
    worker: Worker, pool: Pool, target: Target, value: Any, merge_path: str | None
) -> None:
    pages = {"on_success": {"while": "{{ false }}", "merge_path": merge_path}}
    await step(pool, value, into(target), **({"retry": pages} if merge_path else {}))

    await worker.done()

    assert await target.rows("SELECT id FROM t") == [(1,)]


async def test_a_result_that_has_no_rows_says_what_a_row_is(
    worker: Worker, pool: Pool, target: Target
) -> None:
    await step(pool, [{"id": 1}, 2], into(target))

    error = await worker.error()

    assert error.message == (
        "sink: `args` is missing, and the result of the step has a int as row 2: "
        "a row is a mapping of columns to values"
    )


async def test_a_ledger_that_may_not_be_created_says_how_it_is_made(
    worker: Worker, pool: Pool, target: Target
) -> None:
    await target.conn.execute(
        "REVOKE CREATE ON SCHEMA public FROM PUBLIC; DROP ROLE IF EXISTS sink_writer;"
        "CREATE ROLE sink_writer LOGIN; GRANT ALL ON t TO sink_writer"
    )
    auth = target.dsn.replace("postgres@", "sink_writer@")
    await step(pool, {"id": 1}, into(target, auth=auth))

    error = await worker.error()

    assert error.code == "NO_SINK_LEDGER"
    assert "CREATE TABLE IF NOT EXISTS noetl_sink_ledger" in error.message
    await target.conn.execute("DROP OWNED BY sink_writer; DROP ROLE sink_writer")


async def test_duckdb_creates_the_table_and_writes_once(
    worker: Worker, pool: Pool, tmp_path: Path
) -> None:
    file = str(tmp_path / "sink.duckdb")
    sink = {"tool": "duckdb", "database": file, "table": "t", "args": "{{ input.rows }}"}
    await step(pool, 0, sink, input={"rows": []})

    await worker.done("a.1#1", input={"rows": [{"id": 1, "note": "x"}, {"id": 2}]})
    await worker.done("a.1#2", input={"rows": [{"id": 1, "note": "x"}, {"id": 2}]})
    await worker.done("a.1@2#1", input={"rows": [{"id": 3, "note": "z"}]})

    rows = await read_duckdb(file, "SELECT id, note FROM t ORDER BY id")
    assert rows == [(1, "x"), (2, None), (3, "z")]
    ledger = await read_duckdb(file, LEDGER)
    assert ledger == [(f"{EXECUTION}:a.1", "a", 2), (f"{EXECUTION}:a.1@2", "a", 1)]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("upsert", [(1, "new", 10), (2, "b", 20), (3, "c", None)]),
        ("replace", [(1, "new", None), (2, "b", 20), (3, "c", None)]),
    ],
)
async def test_duckdb_upserts_and_replaces(
    worker: Worker, pool: Pool, tmp_path: Path, mode: str, expected: list[tuple[Any, ...]]
) -> None:
    file = str(tmp_path / "sink.duckdb")
    sink = {"tool": "duckdb", "database": file, "table": "t", "mode": mode, "key": ["id"]}
    given = [{"id": 1, "note": "a", "n": 10}, {"id": 2, "note": "b", "n": 20}]
    await step(pool, 0, {**sink, "args": "{{ input.rows }}"}, input={"rows": []})

    await worker.done("a.1#1", input={"rows": given})
    changed = [{"id": 1, "note": "new"}, {"id": 3, "note": "c"}]
    await worker.done("a.2#1", input={"rows": changed})

    assert await read_duckdb(file, "SELECT id, note, n FROM t ORDER BY id") == expected


async def test_duckdb_runs_a_statement_once(worker: Worker, pool: Pool, tmp_path: Path) -> None:
    file = str(tmp_path / "sink.duckdb")
    command = "CREATE TABLE IF NOT EXISTS t (id int); INSERT INTO t VALUES ($id)"
    await step(pool, 0, {"tool": "duckdb", "database": file, "command": command, "args": {"id": 5}})

    await worker.done("a.1#1")
    await worker.done("a.1#2")

    assert await read_duckdb(file, "SELECT id FROM t") == [(5,)]


async def read_duckdb(file: str, sql: str) -> list[tuple[Any, ...]]:
    def read() -> list[tuple[Any, ...]]:
        with duckdb.connect(file, read_only=True) as conn:
            return conn.execute(sql).fetchall()

    return await asyncio.to_thread(read)


class Listener:
    """An HTTP server that keeps what it was sent."""

    def __init__(self, answer: str) -> None:
        self._answer = f"HTTP/1.1 {answer}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        self.requests: list[tuple[dict[str, str], bytes]] = []

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await reader.readexactly(int(headers["content-length"]))
        self.requests.append(({"": head[0], **headers}, body))
        writer.write(self._answer.encode())
        await writer.drain()
        writer.close()


@asynccontextmanager
async def http(answer: str) -> AsyncIterator[tuple[Listener, str]]:
    listener = Listener(answer)
    async with await asyncio.start_server(listener.take, "127.0.0.1") as server:
        host, port = server.sockets[0].getsockname()
        yield listener, f"http://{host}:{port}/rows"


async def test_a_server_gets_the_result_with_the_same_key_in_every_attempt(
    worker: Worker, pool: Pool
) -> None:
    async with http("200 OK") as (listener, url):
        await step(pool, {"id": 1}, {"tool": "http", "url": url})
        await worker.done("a.1#1")
        await worker.done("a.1#2")

    assert [msgspec.json.decode(body) for _, body in listener.requests] == [{"id": 1}] * 2
    assert {h["idempotency-key"] for h, _ in listener.requests} == {f"{EXECUTION}:a.1"}
    assert listener.requests[0][0][""].startswith("POST /rows ")


async def test_a_server_that_refuses_fails_the_attempt(worker: Worker, pool: Pool) -> None:
    async with http("503 Busy") as (_, url):
        await step(pool, {"id": 1}, {"tool": "http", "url": url, "args": {"a": 1}})
        error = await worker.error()

    assert (error.kind, error.retryable) == ("server_error", True)


async def test_code_gets_the_result_its_args_and_the_key(
    worker: Worker, pool: Pool, tmp_path: Path
) -> None:
    file = tmp_path / "written"
    code = "open(path, 'w').write(f'{result} {input[\"n\"]} {idempotency_key}')"
    await step(
        pool, [1], {"tool": "python", "code": code, "args": {"path": str(file), "n": "{{ 1 + 1 }}"}}
    )

    await worker.done()

    assert file.read_text() == f"[1] 2 {EXECUTION}:a.1"


async def test_code_that_is_late_fails_the_attempt(worker: Worker, pool: Pool) -> None:
    code = "import time\ntime.sleep(30)"
    await step(pool, 1, {"tool": "python", "code": code, "timeout": 0.2})

    error = await worker.error()

    assert (error.kind, error.retryable) == ("timeout", True)


async def test_s3_says_what_can_be_used_instead(worker: Worker, pool: Pool) -> None:
    await step(pool, 1, {"tool": "s3", "bucket": "b", "object": "o"})

    error = await worker.error()

    assert error.kind == "not_supported"
    assert "postgres, duckdb, http or python" in error.message


async def test_a_whole_worker_writes_every_item_of_a_loop(
    database: str, pool: Pool, nats_url: str, target: Target
) -> None:
    loop = {"in": "{{ workload.ids }}", "iterator": "id"}
    sink = into(target, args={"id": "{{ iter.id }}", "note": "{{ output.data }}"})
    await step(pool, "{{ iter.id * 2 }}", sink, loop=loop)

    async with desk.listening(nats_url, pool) as ear, desk.working(desk.config(database, nats_url)):
        keys = [await desk.issue(pool, CatalogId(1), "a", index=n, element=n) for n in range(5)]
        for n, key in enumerate(keys):
            assert await ear.done(key) == n * 2

    rows = await target.rows("SELECT id, note FROM t ORDER BY 1")
    assert rows == [(n, str(n * 2)) for n in range(5)]
