"""The schema changes while all runs: no answer fails, no attempt is lost, nobody restarts."""

import asyncio
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from chaos.stack import NOETL, Stack, running_stack
from flow.conftest import PATIENT_LEASES
from noetl_core.store.migration_file import NO_TRANSACTION, migrations_directory

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(1200)]

GAP_SECONDS_MAX = 2.0
"""Between two commits of events, whatever a migration waits for."""
STARTED_MIN = 20

FANOUT = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: fanout, path: tests/fanout}
workflow:
  - step: each
    loop: {in: "{{ range(30) | list }}", iterator: item, spec: {max_in_flight: 10}}
    tool: {kind: noop}
    next: {arcs: [{step: last}]}
  - step: last
    tool: {kind: noop}
"""
CHAIN = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: chain, path: tests/chain}
workflow:
  - step: first
    tool: {kind: python, code: "result = {'n': 1}"}
    next: {arcs: [{step: second, when: "{{ output.data.n == 1 }}"}]}
  - step: second
    tool: {kind: wait, seconds: 0.5}
    next: {arcs: [{step: third}]}
  - step: third
    tool: {kind: noop}
"""

MIGRATIONS = {
    "9001_event_column": "ALTER TABLE noetl.event ADD COLUMN test_note text;",
    "9002_columns": """
        ALTER TABLE noetl.command ADD COLUMN test_note text;
        ALTER TABLE noetl.execution ADD COLUMN test_note text;
        ALTER TABLE noetl.result_ref ADD COLUMN test_note text DEFAULT 'constant';
    """,
    "9003_indexes": f"""{NO_TRANSACTION}
        CREATE INDEX CONCURRENTLY event_test_idx ON noetl.event (node_name, event_type);
        CREATE INDEX CONCURRENTLY command_test_idx ON noetl.command (step);
    """,
    "9004_checks": f"""{NO_TRANSACTION}
        ALTER TABLE noetl.event ADD CONSTRAINT test_attempt CHECK (attempt > 0) NOT VALID;
        ALTER TABLE noetl.event VALIDATE CONSTRAINT test_attempt;
        ALTER TABLE noetl.command ADD CONSTRAINT test_attempt CHECK (attempt > 0) NOT VALID;
        ALTER TABLE noetl.command VALIDATE CONSTRAINT test_attempt;
    """,
    "9005_table": """
        CREATE TABLE noetl.test_note (note_id bigint PRIMARY KEY, note text NOT NULL);
        CREATE INDEX test_note_idx ON noetl.test_note (note);
        GRANT SELECT, INSERT ON noetl.test_note TO noetl_broker, noetl_worker;
        GRANT SELECT ON noetl.event, noetl.command TO noetl_broker, noetl_worker;
    """,
    "9006_functions": "{functions}",
    "9007_argument": "{another_argument}",
    "9008_wider": """
        ALTER TABLE noetl.catalog ALTER COLUMN version TYPE bigint;
        ALTER TABLE noetl.runtime ALTER COLUMN capacity TYPE bigint;
        ALTER TABLE noetl.setting ADD COLUMN test_note text;
        ALTER TABLE noetl.execution_shard ADD COLUMN test_note text;
        ALTER TABLE noetl.projection_checkpoint ALTER COLUMN lag_ms TYPE bigint;
    """,
    "9009_types": """
        ALTER TABLE noetl.execution ALTER COLUMN path TYPE varchar;
        ALTER TABLE noetl.event ALTER COLUMN status TYPE varchar;
        ALTER TABLE noetl.command ALTER COLUMN pool TYPE varchar;
    """,
}


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    options = ("--processes", "--workers", "2", "--no-restart")
    with running_stack(tmp_path / "stack", *options, **PATIENT_LEASES) as running:
        yield running


class Load:
    """Clients that never rest: they start executions, and look at them."""

    def __init__(self, stack: Stack) -> None:
        self._client = stack.client
        self._is_over = False
        self.answers: Counter[int] = Counter()
        self.failures: list[str] = []
        self.started: list[int] = []
        self.slowest_s = 0.0

    async def run(self) -> None:
        await asyncio.gather(self._start(), self._start(), self._read(), self._read())

    def end(self) -> None:
        self._is_over = True

    async def has_begun(self) -> bool:
        """With less load a test would show nothing."""
        return len(self.started) > STARTED_MIN

    async def _start(self) -> None:
        for number in itertools.count():
            if self._is_over:
                return
            await self._ask("POST", "/api/catalog/register", {"content": f"{CHAIN}# {number}\n"})
            for path in ("tests/fanout", "tests/chain"):
                answer = await self._ask("POST", "/api/execute", {"path": path, "payload": {}})
                if answer is not None:
                    self.started.append(int(answer["execution_id"]))
            await asyncio.sleep(0.2)

    async def _read(self) -> None:
        while not self._is_over:
            if self.started:
                execution_id = random.choice(self.started[-50:])
                await self._ask("GET", f"/api/executions/{execution_id}")
                await self._ask("GET", f"/api/executions/{execution_id}/events")
            await self._ask("GET", "/api/executions")
            await asyncio.sleep(0.02)

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        asked_at = time.monotonic()
        try:
            answer = await self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            self.failures.append(f"{method} {path}: {error!r}")
            return None
        self.slowest_s = max(self.slowest_s, time.monotonic() - asked_at)
        self.answers[answer.status_code] += 1
        if answer.is_success:
            return answer.json()
        self.failures.append(f"{method} {path}: {answer.status_code} {answer.text}")
        return None


@asynccontextmanager
async def under_load(stack: Stack) -> AsyncIterator[Load]:
    """At the end everything that was started has completed, and nothing has gone wrong."""
    pids = stack.parts()
    await stack.register(FANOUT)
    await stack.register(CHAIN)
    load = Load(stack)
    running = asyncio.create_task(load.run())
    try:
        await asyncio.sleep(2.0)
        yield load
        await until(load.has_begun, seconds=120)
    finally:
        load.end()
        await running
    assert load.failures == []
    await assert_all_completed(stack, load.started)
    assert stack.parts() == pids, "a process was restarted"
    assert worries(stack) == []


async def assert_all_completed(stack: Stack, executions: list[int]) -> None:
    for execution_id in executions:
        assert await stack.until_ended(execution_id, seconds=120) == "execution.completed"
        await stack.until_projected(execution_id, "COMPLETED")
    lost = await stack.query(
        "SELECT execution_id, event_type, event_key FROM noetl.event"
        " WHERE event_type = 'command.expired' OR attempt > 1"
    )
    assert lost == []
    assert await count(stack, "command") == 0
    assert await count(stack, "dead_letter") == 0


async def count(stack: Stack, table: str) -> int:
    return int((await stack.query(f"SELECT count(*) FROM noetl.{table}"))[0]["count"])


def worries(stack: Stack) -> list[dict[str, Any]]:
    """What services have logged above `info`."""
    lines = [
        json.loads(line)
        for file in sorted((stack.data_dir / "logs").glob("*.log"))
        if file.stem not in ("postgres", "nats")
        for line in file.read_text().splitlines()
        if line.startswith("{")
    ]
    return [line for line in lines if line.get("level") not in ("debug", "info")]


class Migrator:
    """`noetl db migrate` as a process, with migrations that come after the real ones."""

    def __init__(self, stack: Stack, directory: Path) -> None:
        self._stack = stack
        self.directory = directory
        self._errors = directory.with_suffix(".err")
        shutil.copytree(migrations_directory(), directory)

    def add(self, name: str, sql: str) -> None:
        (self.directory / f"{name}.sql").write_text(sql)

    @contextmanager
    def running(self) -> Iterator["subprocess.Popen[str]"]:
        command = [str(NOETL), "db", "migrate", "--dsn", self._stack.info["dsn"]]
        command += ["--directory", str(self.directory)]
        with self._errors.open("w") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def said(self) -> str:
        """What the last one that ran has written to stderr by now."""
        return self._errors.read_text()

    async def run(self) -> list[str]:
        with self.running() as process:
            out, _ = await asyncio.to_thread(process.communicate, timeout=240)
        print(self.said())
        assert process.returncode == 0, self.said()
        return out.splitlines()


@pytest.fixture
async def migrator(stack: Stack, tmp_path: Path) -> Migrator:
    return Migrator(stack, tmp_path / "migrations")


async def functions(stack: Stack) -> dict[str, str]:
    rows = await stack.query(
        "SELECT proname, pg_get_functiondef(oid) AS definition FROM pg_proc"
        " WHERE pronamespace = 'noetl'::regnamespace"
    )
    return {row["proname"]: row["definition"] for row in rows}


async def longest_gap(stack: Stack, since: datetime, until: datetime) -> float:
    """The longest time in which no transaction began that has recorded events."""
    rows = await stack.query(
        "WITH moment AS (SELECT $1::timestamptz AS at UNION SELECT $2 UNION"
        "  SELECT created_at FROM noetl.event WHERE created_at BETWEEN $1 AND $2)"
        " SELECT max(gap) FROM (SELECT extract(epoch FROM at - lag(at) OVER (ORDER BY at)) AS gap"
        "  FROM moment) AS gaps",
        since,
        until,
    )
    return float(rows[0]["max"])


async def now(stack: Stack) -> datetime:
    return (await stack.query("SELECT clock_timestamp() AS at"))[0]["at"]  # type: ignore[no-any-return]


async def until(holds: Callable[[], Awaitable[bool]], *, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not await holds():
        assert time.monotonic() < deadline, f"it did not happen in {seconds} s"
        await asyncio.sleep(0.02)


async def has_session(stack: Stack) -> bool:
    """Whether a migrator is connected."""
    return bool(
        await stack.query("SELECT FROM pg_stat_activity WHERE application_name = 'noetl db'")
    )


async def invalid_indexes(stack: Stack) -> list[str]:
    rows = await stack.query("SELECT indexrelid::regclass::text FROM pg_index WHERE NOT indisvalid")
    return [row[0] for row in rows]


async def test_nobody_notices_a_series_of_migrations(stack: Stack, migrator: Migrator) -> None:
    defined = await functions(stack)
    commit = defined["commit_batch"].replace("CREATE OR REPLACE", "CREATE")
    wider = commit.replace("inbox_ids bigint[])", "inbox_ids bigint[], test_note text DEFAULT '')")
    assert wider != commit
    generated = {
        "{functions}": ";\n".join(defined.values()),
        "{another_argument}": f"DROP FUNCTION noetl.commit_batch;\n{wider};",
    }
    async with under_load(stack) as load:
        for name, sql in MIGRATIONS.items():
            migrator.add(name, generated.get(sql, sql))
            since = await now(stack)
            assert await migrator.run() == [f"{name}.sql"]
            await asyncio.sleep(0.5)
            gap = await longest_gap(stack, since, await now(stack))
            print(f"{name}: longest time without a commit {gap * 1000:.0f} ms")
            assert gap < GAP_SECONDS_MAX
    print(f"answers {dict(load.answers)}, the slowest after {load.slowest_s * 1000:.0f} ms")
    print(f"{len(load.started)} executions, {await count(stack, 'event')} events")
    assert await invalid_indexes(stack) == []


async def test_a_long_transaction_of_somebody_else_stops_the_migration_and_nothing_else(
    stack: Stack, migrator: Migrator
) -> None:
    migrator.add("9001_event_column", MIGRATIONS["9001_event_column"])
    async with under_load(stack) as load:
        holder = await stack.connect()
        holding = holder.transaction()
        await holding.start()
        await holder.fetch("SELECT count(*) FROM noetl.event")
        since = await now(stack)
        with migrator.running() as process:

            async def has_tried_often() -> bool:
                assert process.poll() is None, "nothing was in its way: this has shown nothing"
                return migrator.said().count("gets no lock") >= 4

            await until(has_tried_often)
            gap = await longest_gap(stack, since, await now(stack))
            await holding.rollback()
            out, _ = await asyncio.to_thread(process.communicate, timeout=240)
        pid = holder.get_server_pid()
        await holder.close()
        assert process.returncode == 0, migrator.said()
        assert out == "9001_event_column.sql\n"
        assert str(pid) in migrator.said()
    print(f"longest time without a commit {gap * 1000:.0f} ms,", end=" ")
    print(f"slowest answer after {load.slowest_s * 1000:.0f} ms\n{migrator.said()}")
    assert gap < GAP_SECONDS_MAX


async def test_a_migrator_that_is_killed_while_it_makes_an_index_can_be_run_again(
    stack: Stack, migrator: Migrator
) -> None:
    migrator.add("9003_indexes", MIGRATIONS["9003_indexes"])

    async def is_building() -> bool:
        phases = "SELECT phase FROM pg_stat_progress_create_index WHERE phase LIKE 'waiting%'"
        return bool(await stack.query(phases))

    async def is_gone() -> bool:
        return not await has_session(stack)

    async with under_load(stack):
        # An open transaction on the partition: the build has to wait for its end.
        holder = await stack.connect()
        holding = holder.transaction()
        await holding.start()
        await holder.execute("LOCK TABLE noetl.event_default IN ROW EXCLUSIVE MODE")
        with migrator.running() as process:
            await until(is_building)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        killed_at = time.monotonic()
        await until(is_gone)
        print(f"the server noticed after {time.monotonic() - killed_at:.2f} s")
        await holding.rollback()
        await holder.close()
        assert await invalid_indexes(stack), "nothing was left behind: this has shown nothing"

        assert await migrator.run() == ["9003_indexes.sql"]

        assert await invalid_indexes(stack) == []
        assert await migrator.run() == ["nothing to do: the schema is up to date"]
