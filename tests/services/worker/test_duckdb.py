"""SQL from playbooks in a real DuckDB."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from noetl_core.domain.envelope import Reference
from noetl_core.domain.result_view import StepDocument
from noetl_worker.tools import duckdb_session
from noetl_worker.tools.duckdb import DuckdbTool
from noetl_worker.tools.duckdb_session import Settings, packaged_extension, reading_of
from services.worker import calls

ROWS = [{"id": 1, "at": "2024-01-02T03:04:05Z", "tags": ["x"]}, {"id": 2, "note": "it's"}]


class Stored:
    """Results of an execution, some of them in files."""

    def __init__(self, value: Any = None, path: Path | None = None) -> None:
        self._value = value
        self._path = path

    async def load(self, _: Reference) -> Any:
        assert self._value is not None, "read in place, or not at all"
        return self._value

    async def file(self, _: Reference) -> Path | None:
        return self._path


@pytest.fixture
async def tool() -> AsyncIterator[DuckdbTool]:
    opened = DuckdbTool(Settings(memory_mb=256, threads=2), calls_max=4)
    yield opened
    await opened.close()


async def query(tool: DuckdbTool, sql: str, **fields: Any) -> Any:
    return await calls.data(tool, config={"query": sql, **fields})


async def test_a_query_gives_rows_columns_and_their_count(tool: DuckdbTool) -> None:
    found = await query(tool, "SELECT range AS n, range * 2 AS twice FROM range(1, 3)")

    assert found == {
        "rows": [{"n": 1, "twice": 2}, {"n": 2, "twice": 4}],
        "row_count": 2,
        "columns": ["n", "twice"],
    }


async def test_the_last_statement_gives_the_result(tool: DuckdbTool) -> None:
    script = "CREATE TABLE t (a int); INSERT INTO t VALUES (1), (2); -- ;\nUPDATE t SET a = a + 1"

    changed = await calls.data(tool, config={"command": script})
    listed = await calls.data(tool, config={"commands": [script, "SELECT sum(a) AS s FROM t;"]})
    made = await calls.data(tool, config={"command": "CREATE TABLE t (a int)"})

    assert changed == {"rows": [], "row_count": 2, "columns": []}
    assert listed["rows"] == [{"s": 5}]
    assert made == {"rows": [], "row_count": 0, "columns": []}


async def test_values_come_back_as_plain_data(tool: DuckdbTool) -> None:
    sql = """
    SELECT 12.50::decimal(10,2) AS money, true AS yes, '2024-01-02T03:04:05Z'::timestamptz AS at,
           '2024-01-02'::date AS day, '0b9d9d7e-0000-0000-0000-000000000001'::uuid AS id,
           '{"a": [1]}'::json AS doc, {'a': [1, 2]} AS nested, MAP {'k': 1} AS map,
           'x'::blob AS raw, NULL AS nothing, 'nan'::double AS nan,
           interval '1 day' AS span, 2::hugeint ** 80 AS big
    """

    (row,) = (await query(tool, sql))["rows"]

    assert row == {
        "money": 12.5,
        "yes": True,
        "at": "2024-01-02T03:04:05+00:00",
        "day": "2024-01-02",
        "id": "0b9d9d7e-0000-0000-0000-000000000001",
        "doc": {"a": [1]},
        "nested": {"a": [1, 2]},
        "map": {"k": 1},
        "raw": "eA==",
        "nothing": None,
        "nan": "nan",
        "span": "P1D",
        "big": 2.0**80,
    }
    assert msgspec.json.encode(row)


@pytest.mark.parametrize(
    ("sql", "params"),
    [
        ("SELECT ? AS a, ? AS b", [1, "x"]),
        ("SELECT $1 AS a, $2 AS b", [1, "x", "unused"]),
        ("SELECT $n AS a, $t AS b", {"n": 1, "t": "x", "unused": 2}),
        ("CREATE TABLE t AS SELECT $n AS a; SELECT a, $t AS b FROM t", {"n": 1, "t": "x"}),
    ],
)
async def test_parameters_are_bound(tool: DuckdbTool, sql: str, params: Any) -> None:
    assert (await query(tool, sql, params=params))["rows"] == [{"a": 1, "b": "x"}]


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"command": " -- nothing"}, "`command` has no statement"),
        ({"command": 5}, "`command` must be SQL"),
        ({"command": "SELECT 1", "params": 5}, "`params` must be a list or a mapping"),
        ({"command": "SELECT $a", "params": {"b": 1}}, "no value for the parameter 'a'"),
        ({"command": "SELECT 1", "database": 5}, "`database` must be a path"),
        ({"command": "SELECT 1", "auth": "pg"}, "`auth` must be a mapping"),
        ({"command": "SELECT 1", "tables": [1]}, "`tables` must be a mapping"),
        ({"command": "SELECT 1", "tables": {"t": "x"}}, "`tables.t` must be a list of rows"),
    ],
)
async def test_a_wrong_field_is_named(
    tool: DuckdbTool, config: dict[str, Any], problem: str
) -> None:
    failed = await calls.error(tool, config=config)

    assert failed.code == "WRONG_FIELD"
    assert problem in failed.message


@pytest.mark.parametrize(
    ("sql", "kind", "message"),
    [
        ("SELEC 1", "parse", 'Parser Error: syntax error at or near "SELEC" (line 1)'),
        ("SELECT * FROM nope", "not_found", "Table with name nope does not exist"),
        ("SELECT nope FROM range(2)", "client_error", 'Referenced column "nope" not found'),
        ("SELECT 'x'::int", "client_error", "Could not convert"),
        ("FROM read_csv('/not/there.csv')", "not_found", "No files found"),
        (
            "CREATE TABLE t (a text PRIMARY KEY); INSERT INTO t VALUES ('s3cret'), ('s3cret')",
            "db_constraint",
            "constraint violation: duplicate key",
        ),
        ("FROM 's3://bucket/x.parquet'", "not_found", "`noetl-worker[duckdb-extensions]`"),
    ],
)
async def test_errors_have_the_kind_that_rules_look_at(
    tool: DuckdbTool, sql: str, kind: str, message: str
) -> None:
    failed = await calls.error(tool, config={"command": sql})

    assert (failed.kind, failed.retryable) == (kind, False)
    assert message in failed.message
    assert "s3cret" not in failed.message


async def test_rows_become_tables_with_their_text_as_it_is(tool: DuckdbTool) -> None:
    found = await query(
        tool,
        'SELECT r.*, n.value FROM "my rows" r JOIN numbers n ON n.value = r.id ORDER BY id',
        tables={"my rows": {"rows": ROWS}, "numbers": [1, 2]},
    )

    assert found["rows"] == [
        {"id": 1, "at": "2024-01-02T03:04:05Z", "tags": ["x"], "note": None, "value": 1},
        {"id": 2, "at": None, "tags": None, "note": "it's", "value": 2},
    ]


async def test_no_rows_are_a_table_too(tool: DuckdbTool) -> None:
    found = await query(
        tool,
        "SELECT count(*) AS n, sum(id) AS s FROM t",
        tables={"t": {"rows": [], "columns": ["id", "note"]}},
    )

    assert found["rows"] == [{"n": 0, "s": None}]


@pytest.mark.parametrize(
    "document",
    [ROWS, {"rows": ROWS, "row_count": 2}, StepDocument(data={"rows": ROWS}, meta={"a": 1})],
)
async def test_a_stored_result_is_read_where_it_lies(
    tool: DuckdbTool, tmp_path: Path, document: Any
) -> None:
    path = tmp_path / "it's a file"
    path.write_bytes(msgspec.json.encode(document))
    reference = {"ref_id": "7", "type": "object_store"}

    found = await calls.data(
        tool,
        config={"query": 'SELECT id, note, "at" FROM t ORDER BY id', "tables": {"t": reference}},
        results=Stored(path=path),
    )

    assert found["rows"] == [
        {"id": 1, "note": None, "at": "2024-01-02T03:04:05Z"},
        {"id": 2, "note": "it's", "at": None},
    ]


async def test_a_result_that_no_file_holds_as_rows_is_loaded(
    tool: DuckdbTool, tmp_path: Path
) -> None:
    path = tmp_path / "page"
    path.write_bytes(msgspec.json.encode({"status_code": 200, "data": ROWS}))
    config = {
        "query": "SELECT count(*) AS n FROM t",
        "tables": {"t": {"ref_id": "7", "type": "db"}},
    }

    inline = await calls.data(tool, config=config, results=Stored(value={"rows": ROWS}))
    other = await calls.data(tool, config=config, results=Stored(value={"data": ROWS}, path=path))

    assert reading_of(path) is None
    assert inline["rows"] == other["rows"] == [{"n": 2}]


async def test_a_parquet_file_is_read_where_it_lies(tool: DuckdbTool, tmp_path: Path) -> None:
    path = tmp_path / "result"
    await query(tool, f"COPY (SELECT 5 AS a) TO '{path}' (FORMAT parquet)")

    found = await calls.data(
        tool,
        config={"query": "FROM t", "tables": {"t": {"ref_id": 1, "type": "object_store"}}},
        results=Stored(path=path),
    )

    assert found["rows"] == [{"a": 5}]


async def test_calls_on_one_file_take_turns(tool: DuckdbTool, tmp_path: Path) -> None:
    database = str(tmp_path / "a.duckdb")
    await query(tool, "CREATE TABLE t (a int)", database=database)

    await asyncio.gather(
        *(
            query(tool, "INSERT INTO t VALUES ($n)", database=database, params={"n": n})
            for n in range(12)
        )
    )
    found = await query(tool, "SELECT count(DISTINCT a) AS n FROM t", database=database)

    assert found["rows"] == [{"n": 12}]


async def test_a_script_that_fails_leaves_nothing_behind(tool: DuckdbTool, tmp_path: Path) -> None:
    database = str(tmp_path / "a.duckdb")
    script = "CREATE TABLE t (a int); INSERT INTO t VALUES (1); INSERT INTO t VALUES ('x')"

    await calls.error(tool, config={"command": script, "database": database})
    left = await query(tool, "SELECT count(*) AS n FROM duckdb_tables()", database=database)

    assert left["rows"] == [{"n": 0}]


async def test_what_refuses_to_be_in_a_transaction_still_runs_in_a_script(
    tool: DuckdbTool, tmp_path: Path
) -> None:
    script = (
        f"CREATE TABLE t AS SELECT 1 AS a; ATTACH '{tmp_path / 'other.duckdb'}' AS other;"
        "CREATE TABLE other.t AS FROM t; CHECKPOINT; BEGIN; DROP TABLE t; COMMIT; FROM other.t"
    )

    assert (await query(tool, script))["rows"] == [{"a": 1}]


async def test_a_file_that_another_process_holds_is_waited_for_and_then_said(
    tool: DuckdbTool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = str(tmp_path / "a.duckdb")
    code = f"import duckdb; c = duckdb.connect({database!r}); print('held', flush=True); input()"
    holder = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    await asyncio.to_thread(holder.stdout.readline)
    with monkeypatch.context() as impatient:
        impatient.setattr(duckdb_session, "LOCK_SECONDS_MAX", 0.1)
        failed = await calls.error(tool, config={"query": "SELECT 1", "database": database})
    waiting = asyncio.create_task(query(tool, "SELECT 1 AS one", database=database))
    await asyncio.sleep(0.2)
    holder.stdin.close()
    holder.wait()

    assert (failed.kind, failed.code, failed.retryable) == ("connection", "LOCKED", True)
    assert (await waiting)["rows"] == [{"one": 1}]


async def test_a_late_query_is_interrupted_and_the_file_is_free(
    tool: DuckdbTool, tmp_path: Path
) -> None:
    database = str(tmp_path / "a.duckdb")
    endless = "SELECT count(*) FROM range(1000000000000) WHERE range % 3 = 7"
    started = time.monotonic()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await query(tool, endless, database=database)

    assert (await query(tool, "SELECT 1 AS one", database=database))["rows"] == [{"one": 1}]
    assert time.monotonic() - started < 20


async def test_calls_do_not_see_each_others_tables(tool: DuckdbTool) -> None:
    await query(tool, "CREATE TABLE left_over (a int)")

    assert (await calls.error(tool, config={"query": "FROM left_over"})).kind == "not_found"


async def test_memory_is_bounded_and_the_playbook_cannot_raise_it() -> None:
    tool = DuckdbTool(Settings(memory_mb=32, threads=1), calls_max=1)
    try:
        failed = await calls.error(
            tool, config={"query": "SELECT length(list(range)) FROM range(100000000)"}
        )
        refused = await calls.error(tool, config={"command": "SET memory_limit = '64GB'"})
        allowed = await query(tool, "SET TimeZone = 'Asia/Tokyo'; SELECT 1 AS one")
    finally:
        await tool.close()

    assert failed.kind == "out_of_memory"
    assert "NOETL_DUCKDB_MEMORY_MB" in failed.message
    assert "locked" in refused.message
    assert allowed["rows"] == [{"one": 1}]


async def test_sql_cannot_see_the_variables_of_the_worker(tool: DuckdbTool) -> None:
    assert (await calls.error(tool, config={"query": "FROM settings"})).kind == "not_found"


@pytest.mark.skipif(packaged_extension("postgres_scanner") is not None, reason="it is installed")
async def test_a_missing_extension_says_what_to_do(tool: DuckdbTool) -> None:
    failed = await calls.error(
        tool,
        config={"query": "SELECT 1", "auth": {"pg": "mine"}},
        credentials={"mine": {"dsn": "postgresql://u:hunter2@127.0.0.1:1/x"}},
    )

    assert failed.code == "NO_EXTENSION"
    assert "NOETL_DUCKDB_EXTENSION_DIR" in failed.message
    assert "hunter2" not in failed.message


async def test_a_credential_of_no_use_here_is_said(tool: DuckdbTool) -> None:
    failed = await calls.error(
        tool,
        config={"query": "SELECT 1", "auth": {"x": "mine"}},
        credentials={"mine": {"token": "hunter2"}},
    )

    assert "`auth.x` names 'mine'" in failed.message
    assert "hunter2" not in failed.message


@pytest.mark.skipif(packaged_extension("postgres_scanner") is None, reason="it is not installed")
async def test_a_postgres_is_attached_under_its_alias(
    tool: DuckdbTool, empty_database: str
) -> None:
    script = (
        "CREATE TABLE mine AS SELECT range AS a FROM range(3); CREATE TABLE pg.t AS FROM mine;"
        "SELECT sum(a)::int AS s FROM pg.t"
    )

    found = await calls.data(
        tool,
        config={"command": script, "auth": {"pg": "mine"}},
        credentials={"mine": {"dsn": empty_database}},
    )
    away = await calls.error(
        tool,
        config={"command": script, "auth": {"pg": "mine"}},
        credentials={"mine": {"dsn": "postgresql://u:hunter%402@127.0.0.1:1/x"}},
    )

    assert found["rows"] == [{"s": 3}]
    assert (away.kind, away.retryable) == ("connection", True)
    assert "hunter" not in away.message


@pytest.mark.skipif(packaged_extension("httpfs") is None, reason="it is not installed")
async def test_the_keys_of_s3_become_a_secret_that_nobody_can_read(tool: DuckdbTool) -> None:
    keys = {"access_key_id": "a", "secret_access_key": "hunter2", "endpoint": "http://127.0.0.1:1"}

    found = await calls.data(
        tool,
        config={"query": "FROM duckdb_secrets()", "auth": {"lake": "mine"}},
        credentials={"mine": keys},
    )

    assert "endpoint=127.0.0.1:1" in str(found["rows"])
    assert "hunter2" not in str(found["rows"])
