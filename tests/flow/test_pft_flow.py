"""Ten facilities, a thousand patients each, five types of data, from an API that often fails.

The playbook is tests/fixtures/playbooks/pft_flow.yaml. What must hold is asked of the log and of
the tables that it filled, never of what it says about itself.
"""

import asyncio
import json
import math
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from chaos.stack import Stack, running_stack
from noetl_core.domain.ids import StepName
from noetl_core.domain.parse import parse_playbook
from noetl_core.store.postgres import Connection, is_postgres_away
from noetl_worker.tools.postgres import PostgresTool
from services.worker import calls
from support.mock_api import DATA_TYPES, Clinic, Trouble, running_mock_api

PLAYBOOK = Path(__file__).parents[1] / "fixtures" / "playbooks" / "pft_flow.yaml"
TROUBLE = Trouble(rate_limited=0.03, broken=0.03, slow=0.05)

SMALL = Clinic(facilities=2, patients=100)
FULL = Clinic(facilities=10, patients=1000)

LAG_MS_P95_MAX = 500.0
RESULT_BYTES_P99_MAX = 2048
KILL_SECONDS = 10.0
SAMPLE_SECONDS = 0.2

# A busy machine must not look like a dead worker while nobody is killed.
PATIENT_LEASES = {
    "NOETL_SHARD_LEASE_SECONDS": "10",
    "NOETL_SHARD_HEARTBEAT_SECONDS": "2",
    "NOETL_LEASE_SECONDS": "30",
    "NOETL_HEARTBEAT_SECONDS": "2",
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(
        tmp_path_factory.mktemp("pft"), "--processes", "--workers", "2", **PATIENT_LEASES
    ) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_small_clinic_is_loaded_to_the_last_record(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"page_size": 25, "batch_size": 40, "patients_per_call": 4}
    execution_id, figures = await load(stack, SMALL, seconds=240, **sizes)

    await assert_all_is_right(stack, execution_id, SMALL)
    say(capsys, "pft_flow, 2 x 100", figures)
    assert figures.result_bytes_p99 < RESULT_BYTES_P99_MAX


@pytest.mark.slow
@pytest.mark.measured
@pytest.mark.timeout(2400)
async def test_ten_facilities_are_loaded_to_the_last_record(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = running_parts(stack)

    execution_id, figures = await load(stack, FULL, seconds=2000)

    await assert_all_is_right(stack, execution_id, FULL)
    say(capsys, "pft_flow, 10 x 1000", figures)
    assert running_parts(stack) == parts, "a part ended by itself"
    assert figures.lag_ms_p95 < LAG_MS_P95_MAX
    assert figures.result_bytes_p99 < RESULT_BYTES_P99_MAX


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(3600)
async def test_a_kill_every_ten_seconds_loses_no_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_stack(tmp_path / "pft", "--processes", "--workers", "2") as stack:
        async with random_kills(stack, seed=7) as killed:
            execution_id, figures = await load(stack, FULL, seconds=3000)

        await assert_all_is_right(stack, execution_id, FULL)
        say(capsys, f"pft_flow, 10 x 1000, {len(killed)} kills", figures)
        assert killed
        assert_only_the_killed_ended(stack, killed)
        assert figures.result_bytes_p99 < RESULT_BYTES_P99_MAX


async def test_two_runs_of_one_claim_get_the_same_batch(empty_database: str) -> None:
    tool = PostgresTool()
    try:
        await run_statement(tool, empty_database, "setup")
        await calls.data(tool, config={"auth": empty_database, "command": _QUEUE_TEN_PATIENTS})
        params = {"facility": "F01", "data_type": "conditions", "patients_per_call": 2}
        claims = [
            run_statement(
                tool, empty_database, "claim_conditions", batch_size=4, claim_key=key, **params
            )
            for key in ("one", "one", "one", "two", "two", "two")
        ]
        batches = [claimed["rows"] for claimed in await asyncio.gather(*claims)]
    finally:
        await tool.close()

    assert batches[0] == batches[1] == batches[2]
    assert batches[3] == batches[4] == batches[5]
    patients = [row["ids"].split(",") for row in batches[0] + batches[3]]
    assert len({patient for ids in patients for patient in ids}) == 8


_QUEUE_TEN_PATIENTS = """
INSERT INTO pft.work (facility_id, data_type, patient_id, expected)
SELECT 'F01', 'conditions', 'P' || number, 1 FROM generate_series(1, 10) AS number
"""


async def run_statement(tool: PostgresTool, dsn: str, step: str, **params: object) -> Any:
    """The statement of a step of the playbook, as its worker would run it."""
    (task,) = parse_playbook(PLAYBOOK.read_text(), file=PLAYBOOK.name).steps[StepName(step)].tool
    command = task.config["command"].replace("{{ workload.schema }}", "pft")
    return await calls.data(tool, config={"auth": dsn, "command": command, "params": params})


# -- the act ---------------------------------------------------------------------------------------


class Figures(NamedTuple):
    wall_seconds: float
    tasks: int
    failed_tasks: int
    expired_commands: int
    reloads: int
    requests: int
    lag_ms_p95: float
    result_bytes_p99: float

    def __str__(self) -> str:
        return (
            f"wall {self.wall_seconds:.1f} s, tasks {self.tasks} ({self.failed_tasks} failed, "
            f"{self.expired_commands} more expired), "
            f"{self.tasks / self.wall_seconds:.0f} tasks/s, requests {self.requests}, "
            f"reloads {self.reloads}, projection lag p95 {self.lag_ms_p95:.0f} ms, "
            f"event.result p99 {self.result_bytes_p99:.0f} bytes"
        )


async def load(
    stack: Stack, clinic: Clinic, *, seconds: float, **sizes: int
) -> tuple[int, Figures]:
    await give_database(stack)
    path = await stack.register(PLAYBOOK.read_text())
    with running_mock_api(clinic, TROUBLE) as api:
        schema = schema_of(clinic)
        payload = {"api": api, "schema": schema, "expected_patients": clinic.patients, **sizes}
        started = time.monotonic()
        execution_id = await stack.execute(path, payload)
        ended, lags_ms = await watch(stack, execution_id, seconds=seconds)
        wall_seconds = time.monotonic() - started
        requests = (await stack.client.get(f"{api}/stats")).json()["answered"]
    assert ended == "execution.completed", await why(stack, execution_id)
    return execution_id, await figures_of(stack, execution_id, wall_seconds, requests, lags_ms)


def schema_of(clinic: Clinic) -> str:
    return f"pft_{clinic.facilities}_{clinic.patients}"


async def give_database(stack: Stack) -> None:
    credential = {"name": "pft_database", "type": "postgres", "data": {"dsn": stack.info["dsn"]}}
    answer = await stack.client.put("/api/credentials", json=credential)
    assert answer.is_success, answer.text


async def why(stack: Stack, execution_id: int) -> Any:
    return await stack.query(
        "SELECT event_type, node_name, error FROM noetl.event "
        "WHERE execution_id = $1 AND error IS NOT NULL ORDER BY event_id DESC LIMIT 3",
        execution_id,
    )


def say(capsys: pytest.CaptureFixture[str], what: str, figures: Figures) -> None:
    with capsys.disabled():
        print(f"\n{what}: {figures}")


# -- what is measured ------------------------------------------------------------------------------

# One range of the primary key: what is watched must not feel it.
_LOOK = """
SELECT
    (SELECT event_type FROM noetl.event WHERE execution_id = $1 AND event_key = 'end') AS ended,
    coalesce(extract(epoch FROM clock_timestamp() - min(created_at)) * 1000, 0)::float AS lag_ms
FROM noetl.event
WHERE execution_id = $1 AND event_id > (
    SELECT coalesce(max(last_projected_event_id), 0) FROM noetl.projection_checkpoint
    WHERE shard_id = (SELECT shard_id FROM noetl.event WHERE execution_id = $1 LIMIT 1)
)
"""


async def watch(stack: Stack, execution_id: int, *, seconds: float) -> tuple[str, list[float]]:
    """How it ended, and five times a second how old the oldest event was that is not projected."""
    lags_ms: list[float] = []
    async with asyncio.timeout(seconds):
        while True:
            try:
                async with connected(stack) as conn:
                    return await look_until_ended(conn, execution_id, lags_ms), lags_ms
            except Exception as error:
                if not is_postgres_away(error):
                    raise
                await asyncio.sleep(SAMPLE_SECONDS)


async def look_until_ended(conn: Connection, execution_id: int, lags_ms: list[float]) -> str:
    while True:
        row = await conn.fetchrow(_LOOK, execution_id)
        assert row is not None
        lags_ms.append(row["lag_ms"])
        if row["ended"] is not None:
            return str(row["ended"])
        await asyncio.sleep(SAMPLE_SECONDS)


@asynccontextmanager
async def connected(stack: Stack) -> AsyncIterator[Connection]:
    conn = await stack.connect()
    try:
        yield conn
    finally:
        conn.terminate()


async def stop(task: asyncio.Task[None]) -> None:
    """Stops it; what it died of by itself comes out here."""
    task.cancel()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(outcome, Exception):
        raise outcome


async def figures_of(
    stack: Stack, execution_id: int, wall_seconds: float, requests: int, lags_ms: list[float]
) -> Figures:
    (row,) = await stack.query(
        "SELECT count(*) FILTER (WHERE event_type IN ('call.done', 'loop.shard.done')) AS done, "
        "count(*) FILTER (WHERE event_type IN ('call.error', 'loop.shard.failed')) AS failed, "
        "count(*) FILTER (WHERE event_type = 'command.expired') AS expired, "
        "percentile_disc(0.99) WITHIN GROUP (ORDER BY octet_length(result::text)) AS bytes "
        "FROM noetl.event WHERE execution_id = $1",
        execution_id,
    )
    return Figures(
        wall_seconds=wall_seconds,
        tasks=row["done"] + row["failed"],
        failed_tasks=row["failed"],
        expired_commands=row["expired"],
        reloads=stack.log("broker").count('"broker.reload"'),
        requests=requests,
        lag_ms_p95=sorted(lags_ms)[math.ceil(len(lags_ms) * 0.95) - 1],
        result_bytes_p99=row["bytes"],
    )


# -- what must hold --------------------------------------------------------------------------------


async def assert_all_is_right(stack: Stack, execution_id: int, clinic: Clinic) -> None:
    await assert_every_record_is_there_once(stack, clinic)
    await assert_every_command_was_issued_once(stack, execution_id)
    await assert_every_loop_ended_once(stack, execution_id)
    await assert_nothing_is_open(stack, execution_id)


async def assert_every_record_is_there_once(stack: Stack, clinic: Clinic) -> None:
    """Patients, records and the sum of their values, for each facility and type."""
    schema = schema_of(clinic)
    rows = await stack.query(
        "SELECT facility_id, data_type, count(DISTINCT patient_id) AS patients, "
        f"count(*) AS records, sum(value)::integer AS total FROM {schema}.record "
        "GROUP BY facility_id, data_type"
    )
    found = {(row["facility_id"], row["data_type"]): tuple(row)[2:] for row in rows}
    assert found == {
        (facility, data_type): expected_of(clinic, facility, data_type)
        for facility in clinic.facility_ids()
        for data_type in DATA_TYPES
    }
    unfinished = await stack.query(f"SELECT * FROM {schema}.work WHERE status <> 'done' LIMIT 5")
    assert not unfinished


def expected_of(clinic: Clinic, facility: str, data_type: str) -> tuple[int, int, int]:
    patients = clinic.patient_ids(facility)
    records = [record for patient in patients for record in clinic.records(patient, data_type)]
    return len(patients), len(records), sum(record["value"] for record in records)


async def assert_every_command_was_issued_once(stack: Stack, execution_id: int) -> None:
    again = await stack.query(
        "SELECT command_id FROM noetl.event "
        "WHERE execution_id = $1 AND event_type = 'command.issued' "
        "GROUP BY command_id HAVING count(*) > 1",
        execution_id,
    )
    assert not again
    # An attempt follows an attempt that failed or was lost: what has ended well is left alone.
    needless = await stack.query(
        "SELECT regexp_replace(command_id, '#.*', '') AS call FROM noetl.event "
        "WHERE execution_id = $1 AND event_type IN ('call.done', 'loop.shard.done') "
        "GROUP BY call HAVING count(*) > 1",
        execution_id,
    )
    assert not needless


async def assert_every_loop_ended_once(stack: Stack, execution_id: int) -> None:
    loops = await stack.query(
        "SELECT s.node_name, (s.context->>'total')::integer AS total, "
        "count(DISTINCT d.event_id) AS ends, min((d.context->>'done')::integer) AS done, "
        "count(DISTINCT i.iter_index) AS issued "
        "FROM noetl.event AS s "
        "LEFT JOIN noetl.event AS d ON d.execution_id = s.execution_id "
        "AND d.loop_id = s.event_id AND d.event_type IN ('loop.done', 'loop.fanin.completed') "
        "LEFT JOIN noetl.event AS i ON i.execution_id = s.execution_id "
        "AND i.loop_id = s.event_id AND i.event_type = 'command.issued' "
        "WHERE s.execution_id = $1 AND s.event_type IN ('loop.started', 'loop.fanout.started') "
        "GROUP BY s.event_id, s.node_name, s.context",
        execution_id,
    )
    assert {row["node_name"] for row in loops} == {f"fetch_{kind}" for kind in DATA_TYPES}
    assert [tuple(row) for row in loops if row["ends"] != 1] == []
    assert [tuple(row) for row in loops if not row["total"] == row["done"] == row["issued"]] == []


async def assert_nothing_is_open(stack: Stack, execution_id: int) -> None:
    open_commands = await stack.query(
        "SELECT command_id FROM noetl.command WHERE execution_id = $1", execution_id
    )
    assert not open_commands
    assert not await stack.query("SELECT * FROM noetl.dead_letter")
    await stack.until_projected(execution_id, "COMPLETED")


def assert_only_the_killed_ended(stack: Stack, killed: list[str]) -> None:
    """Who starts again without having been killed has crashed. Postgres and NATS do not say."""
    starts = {name: stack.log(name).count('"process.ready"') for name in running_parts(stack)}
    assert {n: count for n, count in starts.items() if count > 1 + killed.count(n)} == {}


# -- chaos -----------------------------------------------------------------------------------------


@asynccontextmanager
async def random_kills(stack: Stack, *, seed: int) -> AsyncIterator[list[str]]:
    """kill -9 of one part every ten seconds, each once before one comes again."""
    killed: list[str] = []
    dice = random.Random(seed)

    async def kill() -> None:
        while True:
            names = sorted(running_parts(stack))
            for name in dice.sample(names, len(names)):
                await asyncio.sleep(KILL_SECONDS)
                with suppress(ProcessLookupError, KeyError):
                    os.kill(running_parts(stack)[name], signal.SIGKILL)
                    killed.append(name)

    killer = asyncio.create_task(kill())
    try:
        yield killed
    finally:
        await stop(killer)


def running_parts(stack: Stack) -> dict[str, int]:
    """Names and process ids as the stack has them on record, without a process to ask for it."""
    parts = json.loads((stack.data_dir / "dev.json").read_text())["parts"]
    return {part["name"]: part["pid"] for part in parts}
