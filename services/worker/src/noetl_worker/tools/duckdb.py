"""`duckdb`: runs SQL in DuckDB, in a thread of this process. The last statement gives the rows.

A database file takes one instance at a time, so calls on the same file take turns here, and wait a
while for one in another process.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from weakref import WeakValueDictionary

import duckdb
import msgspec
import structlog

from noetl_core.domain.envelope import Reference
from noetl_worker.tools.duckdb_errors import error_of
from noetl_worker.tools.duckdb_session import (
    MEMORY,
    Job,
    Rows,
    Session,
    Settings,
    Source,
    identifier,
    literal,
    reading_of,
)
from noetl_worker.tools.postgres import dsn_of
from noetl_worker.tools.tool import Credential, ToolCall, ToolResult, wrong_field

STOP_SECONDS_MAX = 5.0
STOP_POLL_SECONDS = 0.05
_SQL = ("command", "commands", "query")
_TEXT_OF_S3 = {
    "KEY_ID": ("access_key_id", "aws_access_key_id", "access_key", "key_id"),
    "SECRET": ("secret_access_key", "aws_secret_access_key", "secret_key", "secret"),
    "SESSION_TOKEN": ("session_token", "aws_session_token"),
    "REGION": ("region", "region_name", "aws_region"),
    "SCOPE": ("scope",),
}

log = structlog.get_logger()


class DuckdbTool:
    kind = "duckdb"

    def __init__(self, settings: Settings, *, calls_max: int) -> None:
        self._settings = settings
        self.size = calls_max
        self.busy = 0
        self._threads = ThreadPoolExecutor(calls_max, thread_name_prefix="duckdb")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(self, call: ToolCall) -> ToolResult:
        job = await _job(call)
        try:
            async with self._turn(job.database):
                return ToolResult(await self._in_thread(Session(job, self._settings)))
        except duckdb.Error as error:
            return ToolResult(error=error_of(error))

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _turn(self, database: str) -> AbstractAsyncContextManager[Any]:
        if database == MEMORY:
            return nullcontext()
        lock = self._turns.get(database)
        if lock is None:
            lock = self._turns[database] = asyncio.Lock()
        return lock

    async def _in_thread(self, session: Session) -> dict[str, Any]:
        running = self._threads.submit(session.run)
        self.busy += 1
        try:
            return await asyncio.shield(asyncio.wrap_future(running))
        except asyncio.CancelledError:
            await asyncio.shield(_stop(session, running))
            raise
        finally:
            self.busy -= 1


async def _stop(session: Session, running: Future[dict[str, Any]]) -> None:
    """Interrupt it until it has ended, so that nothing goes on behind our back."""
    until = asyncio.get_running_loop().time() + STOP_SECONDS_MAX
    while not running.cancel() and not running.done():
        if asyncio.get_running_loop().time() > until:
            log.warning("duckdb.not_stopped")
            return
        session.stop()
        await asyncio.sleep(STOP_POLL_SECONDS)


async def _job(call: ToolCall) -> Job:
    params = call.config.get("params")
    if params is not None and not isinstance(params, Mapping | list):
        raise wrong_field("params", f"must be a list or a mapping, not {type(params).__name__}")
    return Job(
        database=_database(call.config.get("database")),
        texts=_texts(call.config),
        params=params or {},
        sources=await _sources(call),
        tables=await _tables(call),
    )


def _database(database: Any) -> str:
    if database is None or database in {"", MEMORY}:
        return MEMORY
    if not isinstance(database, str):
        raise wrong_field("database", f"must be a path or `{MEMORY}`, not {database!r}")
    return str(Path(database).resolve())


def _texts(config: Mapping[str, Any]) -> tuple[str, ...]:
    for field in _SQL:
        value = config.get(field)
        if value is None:
            continue
        texts = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            raise wrong_field(field, "must be SQL")
        return tuple(texts)
    raise wrong_field("command", "is missing")


async def _sources(call: ToolCall) -> tuple[Source, ...]:
    auth = call.config.get("auth") or {}
    if not isinstance(auth, Mapping) or not all(isinstance(name, str) for name in auth.values()):
        raise wrong_field("auth", "must be a mapping from an alias to the name of a credential")
    return tuple([_source(alias, await call.credential(name)) for alias, name in auth.items()])


def _source(alias: str, credential: Credential) -> Source:
    data = credential.data
    if "dsn" in data or "db_host" in data:
        return _postgres(alias, dsn_of(data))
    if _first(data, _TEXT_OF_S3["KEY_ID"]) is not None:
        return _s3(alias, data)
    raise wrong_field(
        f"auth.{alias}",
        f"names {credential.name!r}, which holds neither the DSN of a Postgres nor the keys of S3",
    )


def _postgres(alias: str, dsn: str) -> Source:
    password = urlsplit(dsn).password if "://" in dsn else None
    secrets = (dsn, *((password, unquote(password)) if password else ()))
    sql = f"ATTACH {literal(dsn)} AS {identifier(alias)} (TYPE postgres)"
    return Source("postgres_scanner", sql, secrets)


def _s3(alias: str, data: Mapping[str, Any]) -> Source:
    options = {name: _first(data, fields) for name, fields in _TEXT_OF_S3.items()}
    endpoint = _first(data, ("endpoint", "endpoint_url"))
    if endpoint is not None:
        scheme, _, host = endpoint.rpartition("://")
        options |= {"ENDPOINT": host.rstrip("/"), "URL_STYLE": "path"}
        options["USE_SSL"] = "false" if scheme == "http" else "true"
    given = {name: value for name, value in options.items() if value is not None}
    listed = ", ".join(f"{name} {literal(value)}" for name, value in given.items())
    sql = f"CREATE SECRET {identifier(alias)} (TYPE s3, {listed})"
    return Source("httpfs", sql, (given.get("SECRET", ""),) if given.get("SECRET") else ())


def _first(data: Mapping[str, Any], fields: tuple[str, ...]) -> str | None:
    return next((str(data[field]) for field in fields if data.get(field)), None)


async def _tables(call: ToolCall) -> dict[str, Path | Rows]:
    tables = call.config.get("tables") or {}
    if not isinstance(tables, Mapping):
        raise wrong_field("tables", "must be a mapping from a name to rows or to a reference")
    return {name: await _table(call, name, value) for name, value in tables.items()}


async def _table(call: ToolCall, name: str, value: Any) -> Path | Rows:
    reference = _reference(value)
    if reference is not None:
        path = await call.results.file(reference)
        if path is not None and await asyncio.to_thread(reading_of, path) is not None:
            return path
        value = await call.results.load(reference)
    rows = _rows(value)
    if rows is None:
        raise wrong_field(f"tables.{name}", f"must be a list of rows, not {type(value).__name__}")
    return rows


def _reference(value: Any) -> Reference | None:
    """What `{{ step._ref }}` gives."""
    if not isinstance(value, Mapping) or not {"ref_id", "type"} <= value.keys():
        return None
    try:
        return msgspec.convert(value, Reference, strict=False)  # ids are texts in templates
    except msgspec.ValidationError:
        return None


def _rows(value: Any) -> Rows | None:
    """A list, or the list in what a tool that reads rows returns."""
    columns: Any = ()
    if isinstance(value, Mapping):
        columns, value = value.get("columns") or (), value.get("rows", value.get("data"))
    return Rows(value, tuple(map(str, columns))) if isinstance(value, list) else None
