"""What a broker replays after kill -9, and how old checkpoints and statuses are under load."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from chaos.stack import Stack, running_stack
from chaos.test_kill import ITEMS, LOOP, assert_each_item_once
from flow.conftest import PATIENT_LEASES
from noetl_core.domain.ids import EventId, ExecutionId, ShardId
from noetl_core.domain.sharding import SHARD_COUNT_DEFAULT, shard_of
from noetl_core.store import checkpoint
from noetl_core.store.postgres import Connection

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(900)]

RESUME_SECONDS_MAX = 5.0
CHECKPOINT_AGE_P99_MS = 1500.0
LAG_P95_MS = 500.0
ALL_SHARDS = [ShardId(number) for number in range(SHARD_COUNT_DEFAULT)]

SLOW_LOOP = LOOP.replace("time.sleep(0.008)", "time.sleep(0.02)")
"""Long enough for a few epochs, also where the machine is busy."""

FAN_OUT = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: load, path: tests/chaos_load}
workflow:
  - step: each
    loop: {in: "{{ range(2500) | list }}", iterator: item, spec: {mode: fanout}}
    tool: {kind: noop}
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("epochs")
    with running_stack(directory, "--processes", **PATIENT_LEASES) as running:
        yield running


# In one look: how many events of the execution are past its newest recorded checkpoint.
_PAST_CHECKPOINT = """
SELECT count(*) FROM noetl.event
WHERE execution_id = $1
  AND event_id > (SELECT max(last_event_id) FROM noetl.checkpoint WHERE execution_id = $1)
"""


def replayed(stack: Stack, *, after: int) -> list[int]:
    """How many events the broker folded again, each time it did; its log from a place on."""
    lines = [line for line in stack.log("broker")[after:].splitlines() if "states.replayed" in line]
    return [int(json.loads(line)["events"]) for line in lines]


async def until_checkpointed(stack: Stack, execution_id: int) -> None:
    deadline = time.monotonic() + 120
    sql = "SELECT FROM noetl.checkpoint WHERE execution_id = $1"
    while not await stack.query(sql, execution_id):
        assert time.monotonic() < deadline, "no epoch was recorded"
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("asleep", [False, True], ids=["projected", "unprojected"])
async def test_a_killed_broker_replays_only_what_follows_the_last_checkpoint(
    stack: Stack, asleep: bool
) -> None:
    execution_id = await stack.execute(await stack.register(SLOW_LOOP))
    await until_checkpointed(stack, execution_id)
    await stack.until_done(execution_id, ITEMS // 3)
    place = len(stack.log("broker"))
    with sleeping(stack.pid("projection")) if asleep else nullcontext():
        # Without its projection no epoch is recorded, and no snapshot written.
        await stack.until_done(execution_id, ITEMS // 2)
        sessions = await sessions_of_the_broker(stack)
        assert sessions
        stack.kill("broker")
        killed_at = time.monotonic()
        # It is dead and its successor has no lease yet: the log stands still, as soon as Postgres
        # has ended what it was doing for the dead.
        while sessions & await sessions_of_the_broker(stack):  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
        (past,) = await stack.query(_PAST_CHECKPOINT, execution_id)
        before = await stack.done(execution_id)
        await stack.until_done(execution_id, before + 1)
        resumed_seconds = time.monotonic() - killed_at

    assert await stack.until_ended(execution_id) == "execution.completed"
    await assert_each_item_once(stack, execution_id)
    counts = replayed(stack, after=place)
    whole = (
        await stack.query("SELECT count(*) FROM noetl.event WHERE execution_id = $1", execution_id)
    )[0]["count"]
    print(
        f"resumed after {resumed_seconds:.2f} s, replayed {counts} of {whole} events; "
        f"{past['count']} were past the last checkpoint"
    )
    assert resumed_seconds < RESUME_SECONDS_MAX
    assert max(counts, default=0) <= past["count"] < whole
    assert not asleep or max(counts) > 100, "there was nothing to replay: this shows nothing"


async def sessions_of_the_broker(stack: Stack) -> set[int]:
    sql = "SELECT pid FROM pg_stat_activity WHERE application_name = 'noetl_broker'"
    return {row["pid"] for row in await stack.query(sql)}


@contextmanager
def sleeping(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def fresh_stack(tmp_path: Path) -> Iterator[Stack]:
    """One whose figures do not depend on what other tests did to its queue."""
    with running_stack(tmp_path, "--processes", **PATIENT_LEASES) as running:
        yield running


@pytest.mark.timeout(1500)
async def test_checkpoints_and_statuses_stay_young_under_load(fresh_stack: Stack) -> None:
    path = await fresh_stack.register(FAN_OUT)

    await assert_all_is_young(lambda: under_load(fresh_stack, path))


async def under_load(stack: Stack, path: str) -> "Seen":
    running = [await stack.execute(path) for _ in range(8)]
    seen = Seen()
    conn = await stack.connect()
    ended_sql = (
        "SELECT count(*) FROM noetl.event WHERE execution_id = ANY ($1) AND event_key = 'end'"
    )
    passed = dict.fromkeys(ALL_SHARDS, EventId(0))
    deadline = time.monotonic() + 400
    try:
        while await conn.fetchval(ended_sql, running) < len(running):
            assert time.monotonic() < deadline, "the load has not ended"
            found = await checkpoint.ages(conn, passed, limit=5000)
            passed = found.passed
            seen.ages_ms += found.ages_ms.values()
            await seen.look_at_lags(conn)
            await asyncio.sleep(0.1)
    finally:
        await conn.close()
    return seen


STEADY = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: steady, path: tests/chaos_steady}
workflow:
  - step: each
    loop: {in: "{{ range(5000) | list }}", iterator: item, spec: {max_in_flight: 4}}
    tool: {kind: noop}
"""
STEADY_LOOPS = 32
STEADY_SECONDS = 15.0

# Since the newest checkpoint of each shard, whatever has happened there meanwhile.
_SINCE_CHECKPOINT = """
SELECT shard_id, extract(epoch FROM clock_timestamp() - max(committed_at)) * 1000 AS age_ms
FROM noetl.checkpoint WHERE shard_id = ANY ($1::integer[]) GROUP BY shard_id
"""


@pytest.mark.timeout(900)
async def test_shards_that_work_steadily_get_a_checkpoint_every_second(stack: Stack) -> None:
    path = await stack.register(STEADY)
    running = [await stack.execute(path) for _ in range(STEADY_LOOPS)]
    shards = {shard_of(ExecutionId(one), shard_count=SHARD_COUNT_DEFAULT) for one in running}
    for one in running:
        await until_checkpointed(stack, one)
    try:
        await assert_all_is_young(lambda: steadily(stack, shards))
    finally:
        for one in running:
            await stack.client.post(f"/api/executions/{one}/cancel", json={})
        for one in running:
            assert await stack.until_ended(one) == "execution.cancelled"


async def steadily(stack: Stack, shards: set[ShardId]) -> "Seen":
    seen = Seen()
    conn = await stack.connect()
    before = await conn.fetchval("SELECT count(*) FROM noetl.event")
    until = time.monotonic() + STEADY_SECONDS
    try:
        while time.monotonic() < until:
            rows = await conn.fetch(_SINCE_CHECKPOINT, list(shards))
            seen.ages_ms += [float(row["age_ms"]) for row in rows]
            await seen.look_at_lags(conn)
            await asyncio.sleep(0.1)
        events = await conn.fetchval("SELECT count(*) FROM noetl.event") - before
    finally:
        await conn.close()
    print(f"{len(shards)} shards, {events / STEADY_SECONDS:.0f} events/s")
    return seen


class Seen:
    """How old checkpoints were, and how far the projection was behind when it wrote."""

    def __init__(self) -> None:
        self.ages_ms: list[float] = []
        self.lags_ms: list[float] = []
        self._written_at: dict[int, object] | None = None

    async def look_at_lags(self, conn: Connection) -> None:
        """The first look shows what was written before: that is not of this load."""
        sql = "SELECT shard_id, last_projected_at, lag_ms FROM noetl.projection_checkpoint"
        rows = await conn.fetch(sql)
        if self._written_at is not None:
            before = self._written_at
            self.lags_ms += [row["lag_ms"] for row in rows if before.get(row[0]) != row[1]]
        self._written_at = {row["shard_id"]: row["last_projected_at"] for row in rows}


async def assert_all_is_young(look: Callable[[], Awaitable[Seen]]) -> None:
    """Three looks, and the best of them counts: for a while the machine may be somebody else's."""
    ages, lags = [], []
    for _ in range(3):
        seen = await look()
        ages.append(quantile(seen.ages_ms, 0.99))
        lags.append(quantile(seen.lags_ms, 0.95))
        print(f"age p99 {ages[-1]:.0f} ms, lag p95 {lags[-1]:.0f} ms")
        if ages[-1] <= CHECKPOINT_AGE_P99_MS and lags[-1] < LAG_P95_MS:
            return
    raise AssertionError(f"p99 of ages {ages}, p95 of lags {lags}")


def quantile(values: list[float], part: float) -> float:
    assert len(values) > 20, values
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]
