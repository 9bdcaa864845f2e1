"""process/schema.py: a service waits for a schema that is older than itself, and no other."""

import asyncio
import json
import os
import shutil
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from structlog.testing import CapturingLogger

from noetl_core.store import postgres
from noetl_core.store.migration_file import migrations_directory
from noetl_core.store.migrations import migrate
from noetl_core.store.postgres import open_pool
from support.postgres import PostgresServer, free_port

pytestmark = [pytest.mark.slow, pytest.mark.measured, pytest.mark.timeout(600)]

SERVICES = tuple(
    folder.name for folder in sorted((Path(__file__).parents[2] / "services").iterdir())
)
NAMES = sorted(file.name for file in migrations_directory().glob("*.sql"))
SECONDS_MAX = 120


class Running:
    def __init__(self, process: Process, port: int, log: Path) -> None:
        self.process = process
        self._port = port
        self._log = log

    def lines(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self._log.read_text().splitlines() if line[0] == "{"]
        return [line for line in lines if line["event"] == event]

    async def is_ready(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            return False
        writer.write(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return b" 200 " in answer.split(b"\r\n", 1)[0]


@asynccontextmanager
async def running(service: str, dsn: str, nats_url: str, directory: Path) -> AsyncIterator[Running]:
    port, log = free_port(), directory / f"{service}.log"
    environ = os.environ | {
        "NOETL_POSTGRES_DSN": dsn,
        "NOETL_NATS_URL": nats_url,
        "NOETL_HEALTH_PORT": str(port),
        "NOETL_GATEWAY_PORT": str(free_port()),
        "NOETL_STORE_DIR": str(directory),
    }
    module = f"noetl_{service.replace('-', '_')}"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, stdout=output, stderr=output, env=environ
        )
    try:
        yield Running(process, port, log)
    finally:
        if process.returncode is None:
            process.terminate()
            await asyncio.wait_for(process.wait(), SECONDS_MAX)


async def until(holds: Callable[[], Awaitable[bool]], *, seconds: float = SECONDS_MAX) -> None:
    async with asyncio.timeout(seconds):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.1)


async def apply(dsn: str, directory: Path) -> list[str]:
    conn = await asyncpg.connect(dsn)
    try:
        return await migrate(conn, directory=directory)
    finally:
        await conn.close()


async def test_every_service_waits_for_an_older_schema_and_begins_when_it_is_there(
    empty_database: str, nats_url: str, tmp_path: Path
) -> None:
    older = tmp_path / "older"
    older.mkdir()
    for name in NAMES[:-1]:
        shutil.copy(migrations_directory() / name, older)
    await apply(empty_database, older)
    async with AsyncExitStack() as stack:
        services = [
            await stack.enter_async_context(running(service, empty_database, nats_url, tmp_path))
            for service in SERVICES
        ]

        async def all_wait() -> bool:
            return all(service.lines("schema.awaited") for service in services)

        await until(all_wait)
        for service in services:
            assert service.lines("schema.awaited")[0]["missing"] == [NAMES[-1]]
            assert "noetl db migrate" in service.lines("schema.awaited")[0].values()
            assert not await service.is_ready()

        assert await apply(empty_database, migrations_directory()) == [NAMES[-1]]

        for service in services:
            await until(service.is_ready)
            assert service.process.returncode is None
            assert service.lines("schema.ready")


async def test_every_service_works_with_a_newer_schema(
    database: str, nats_url: str, tmp_path: Path
) -> None:
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "9999_newer.sql").write_text("ALTER TABLE noetl.command ADD COLUMN newer text;")
    await apply(database, newer)
    async with AsyncExitStack() as stack:
        services = [
            await stack.enter_async_context(running(service, database, nats_url, tmp_path))
            for service in SERVICES
        ]
        for service in services:
            await until(service.is_ready)
            assert service.lines("schema.newer")[0]["migrations"] == ["9999_newer.sql"]


async def test_a_service_waits_for_the_first_migration_of_a_server(
    own_postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = CapturingLogger()
    monkeypatch.setattr(postgres, "log", said)

    async def current_user() -> str:
        async with open_pool(own_postgres.dsn(), role="noetl_broker", size_max=1) as pool:
            return str(await pool.fetchval("SELECT current_user"))

    waiting = asyncio.create_task(current_user())
    await asyncio.sleep(1.0)
    assert not waiting.done()
    await apply(own_postgres.dsn(), migrations_directory())

    assert await asyncio.wait_for(waiting, SECONDS_MAX) == "noetl_broker"
    assert "noetl db migrate" in said.calls[0].kwargs["error"]


async def test_an_image_of_a_service_can_migrate(empty_database: str, tmp_path: Path) -> None:
    async def run(dsn: str) -> tuple[int | None, list[dict[str, Any]]]:
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("noetl-migrate")),
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"NOETL_POSTGRES_DSN": dsn},
        )
        _, err = await asyncio.wait_for(process.communicate(), SECONDS_MAX)
        return process.returncode, [json.loads(line) for line in err.splitlines()]

    first, again = await run(empty_database), await run(empty_database)
    refused, lines = await run("postgresql://postgres@127.0.0.1:1/nowhere")

    assert first[0] == again[0] == 0
    assert first[1][-1]["applied"] == NAMES
    assert again[1][-1]["applied"] == []
    assert refused == 1
    assert lines[-1]["event"] == "schema.not_migrated"
