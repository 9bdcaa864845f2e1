"""A sink into a file of DuckDB: the rows and the ledger row, in one transaction where DuckDB can.

The ledger is asked first and written last. So a script that DuckDB does not run in one transaction,
because it has databases attached, may write twice after a crash, but never leaves anything out.
"""
# ruff: noqa: S608 - names and values are quoted

from typing import Any

from noetl_core.domain.playbook import Sink
from noetl_worker.sink_rows import Row, Written, by_columns, once_each, with_key
from noetl_worker.tools.duckdb_session import MEMORY, identifier, literal
from noetl_worker.tools.tool import Tool, ToolCall, ToolFailedError, ToolResult, wrong_field

_ALREADY = "noetl: this key is in the ledger"

_CREATE_LEDGER = """
CREATE TABLE IF NOT EXISTS noetl_sink_ledger (
    idempotency_key VARCHAR PRIMARY KEY,
    step VARCHAR NOT NULL,
    row_count BIGINT NOT NULL,
    written_at TIMESTAMPTZ NOT NULL DEFAULT now()
)
"""


async def write_rows(tool: Tool, call: ToolCall, sink: Sink, rows: list[Row]) -> Written:
    """Raises ToolFailedError."""
    if sink.mode == "upsert":
        rows = once_each(rows, sink.key)
    elif sink.mode == "replace":
        _check_keys(rows, sink.key)
    if not rows and sink.mode != "replace":
        return Written()
    grouped = by_columns(rows)
    groups = {columns: f"noetl_sink_rows_{n}" for n, columns in enumerate(grouped)}
    tables = {name: grouped[columns] for columns, name in groups.items()}
    commands = _statements(str(call.config["table"]), sink, groups)
    return await _run(tool, call, commands, row_count=len(rows), tables=tables)


def _check_keys(rows: list[Row], key: tuple[str, ...]) -> None:
    for _ in with_key(rows, key):
        pass


async def run_command(tool: Tool, call: ToolCall, params: Any) -> Written:
    """Raises ToolFailedError."""
    command = call.config["command"]
    commands = command if isinstance(command, list) else [command]
    return await _run(tool, call, commands, row_count=0, params=params)


async def _run(
    tool: Tool, call: ToolCall, commands: list[str], *, row_count: int, **fields: Any
) -> Written:
    if call.config.get("database") in {None, "", MEMORY}:
        raise wrong_field("database", "must be a file: what is written into memory is gone")
    key = literal(call.idempotency_key)
    asked = (
        f"SELECT error({literal(_ALREADY)} || idempotency_key) FROM noetl_sink_ledger "
        f"WHERE idempotency_key = {key}"
    )
    entered = (
        "INSERT INTO noetl_sink_ledger (idempotency_key, step, row_count) "
        f"VALUES ({key}, {literal(call.step)}, {row_count})"
    )
    config = {
        "database": call.config["database"],
        "auth": call.config.get("auth"),
        "commands": [_CREATE_LEDGER, asked, *commands, entered],
        **fields,
    }
    ended = await tool.run(call._replace(config=config))
    assert isinstance(ended, ToolResult), ended
    if ended.error is None:
        return Written(row_count)
    if _ALREADY in ended.error.message:
        return Written(already_written=True)
    raise ToolFailedError(ended.error)


def _statements(table: str, sink: Sink, groups: dict[tuple[str, ...], str]) -> list[str]:
    target = ".".join(map(identifier, table.split(".")))
    statements = []
    if groups:
        read = " UNION ALL BY NAME ".join(f"SELECT * FROM {name}" for name in groups.values())
        statements.append(f"CREATE TABLE IF NOT EXISTS {target} AS FROM ({read}) WHERE false")
    if sink.mode == "replace":
        statements += _deletes(target, sink.key, list(groups.values()))
    if sink.mode == "upsert":
        return statements + [_merge(target, sink.key, *group) for group in groups.items()]
    return statements + [_insert(target, *group) for group in groups.items()]


def _deletes(target: str, key: tuple[str, ...], sources: list[str]) -> list[str]:
    if not key:
        return [f"DELETE FROM {target}"]
    same = _same(key)
    return [
        f"DELETE FROM {target} AS target USING {each} AS given WHERE {same}" for each in sources
    ]


def _merge(target: str, key: tuple[str, ...], columns: tuple[str, ...], source: str) -> str:
    changes = [f"{identifier(n)} = given.{identifier(n)}" for n in columns if n not in key]
    matched = f"WHEN MATCHED THEN UPDATE SET {', '.join(changes)} " if changes else ""
    values = ", ".join(f"given.{identifier(name)}" for name in columns)
    return (
        f"MERGE INTO {target} AS target USING {source} AS given ON ({_same(key)}) {matched}"
        f"WHEN NOT MATCHED THEN INSERT ({_listed(columns)}) VALUES ({values})"
    )


def _insert(target: str, columns: tuple[str, ...], source: str) -> str:
    listed = _listed(columns)
    return f"INSERT INTO {target} ({listed}) SELECT {listed} FROM {source}"


def _same(key: tuple[str, ...]) -> str:
    return " AND ".join(f"target.{identifier(name)} = given.{identifier(name)}" for name in key)


def _listed(columns: tuple[str, ...]) -> str:
    return ", ".join(map(identifier, columns))
