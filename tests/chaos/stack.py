"""`noetl dev --processes` as a real process tree, with leases short enough to watch."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import psutil

from noetl_core.store.postgres import Connection
from support.starting import one_at_a_time

NOETL = Path(sys.executable).with_name("noetl")

SHORT_LEASES = {
    "NOETL_SHARD_LEASE_SECONDS": "1.5",
    "NOETL_SHARD_HEARTBEAT_SECONDS": "0.4",
    "NOETL_LEASE_SECONDS": "3",
    "NOETL_HEARTBEAT_SECONDS": "0.5",
    "NOETL_REAPER_INTERVAL_SECONDS": "0.5",
    "NOETL_REAPER_LEASE_GRACE_SECONDS": "0.2",
    "NOETL_REAPER_RETURN_WAIT_SECONDS": "1.5",
}


class Stack:
    def __init__(self, data_dir: Path, process: subprocess.Popen[str], url: str) -> None:
        self.data_dir = data_dir
        self.process = process
        self.url = url
        self.client = httpx.AsyncClient(base_url=url, timeout=60.0)
        self.info: dict[str, str] = self._ask("info")

    def _ask(self, what: str) -> Any:
        command = [str(NOETL), "dev", what, "--json", "--data-dir", str(self.data_dir)]
        return json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
        )

    def pid(self, name: str) -> int:
        """Of a part that lives: one that is being started again is waited for."""
        deadline = time.monotonic() + 60
        while not _lives(pid := self.parts().get(name, 0)):
            assert time.monotonic() < deadline, f"{name} does not live"
            time.sleep(0.02)
        return pid

    def parts(self) -> dict[str, int]:
        """The parts and their pids, from the file that `noetl dev ps` reads, in no time."""
        state = json.loads((self.data_dir / "dev.json").read_text())
        return {part["name"]: int(part["pid"]) for part in state["parts"]}

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> int:
        pid = self.pid(name)
        os.kill(pid, how)
        return pid

    def log(self, name: str) -> str:
        return (self.data_dir / "logs" / f"{name}.log").read_text()

    async def register(self, content: str) -> str:
        answer = await self._post("/api/catalog/register", {"content": content})
        return str(answer["path"])

    async def execute(self, path: str, payload: dict[str, Any] | None = None) -> int:
        answer = await self._post("/api/execute", {"path": path, "payload": payload or {}})
        return int(answer["execution_id"])

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = await self.client.post(path, json=body)
        assert answer.is_success, answer.text
        return answer.json()

    async def connect(self) -> Connection:
        return await asyncpg.connect(self.info["dsn"])

    async def query(self, sql: str, *values: object, patience: float = 60.0) -> list[Any]:
        """Asks again while Postgres is being restarted."""
        deadline = time.monotonic() + patience
        while True:
            try:
                conn = await self.connect()
                try:
                    return list(await conn.fetch(sql, *values))
                finally:
                    await conn.close()
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)

    async def done(self, execution_id: int) -> int:
        sql = (
            "SELECT count(*) FROM noetl.event WHERE execution_id = $1 AND event_type = 'call.done'"
        )
        return int((await self.query(sql, execution_id))[0]["count"])

    async def until_done(self, execution_id: int, count: int, *, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while await self.done(execution_id) < count:
            assert time.monotonic() < deadline, f"fewer than {count} items in {seconds} s"
            await asyncio.sleep(0.05)

    async def until_ended(self, execution_id: int, *, seconds: float = 240.0) -> str:
        """The terminal event, from the log: it is true even while the projection is away."""
        sql = "SELECT event_type FROM noetl.event WHERE execution_id = $1 AND event_key = 'end'"
        deadline = time.monotonic() + seconds
        while not (rows := await self.query(sql, execution_id)):
            assert time.monotonic() < deadline, f"not ended in {seconds} s"
            await asyncio.sleep(0.1)
        return str(rows[0]["event_type"])

    async def until_projected(
        self, execution_id: int, status: str, *, seconds: float = 60.0
    ) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                answer = await self.client.get(f"/api/executions/{execution_id}")
                if answer.is_success and answer.json()["status"] == status:
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, f"not {status} in {seconds} s"
            await asyncio.sleep(0.1)


@contextmanager
def running_stack(data_dir: Path, *options: str, **environment: str) -> Iterator[Stack]:
    command = [str(NOETL), "dev", "--data-dir", str(data_dir), "--port", "0", *options]
    env = {**os.environ, **SHORT_LEASES, **environment}
    with ExitStack() as at_the_end:
        with one_at_a_time():
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
            at_the_end.callback(_end, process)
            url = _ready_url(process)
        yield Stack(data_dir, process, url)


def _lives(pid: int) -> bool:
    try:
        return pid != 0 and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=150)


def _ready_url(process: subprocess.Popen[str]) -> str:
    """Ends when the line comes, or when the process does."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready: "):
            return line.removeprefix("ready: ").strip()
    raise AssertionError("the stack ended before it was ready")
