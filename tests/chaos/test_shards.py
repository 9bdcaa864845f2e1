"""Shards in real processes: killed owners, a new one, a sleeper, and another number of shards."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chaos.stack import NOETL, SHORT_LEASES, Stack, running_stack
from noetl_core.domain.ids import EventId, ExecutionId
from noetl_core.store import execution_projection, refold
from noetl_core.store.event import event_of
from noetl_core.store.execution_shard import ROLES

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(1200)]

ITEMS = 300
LOOPS = 4
LOOP = f"""
apiVersion: noetl.io/v2
kind: Playbook
metadata: {{name: shards, path: tests/shards}}
workflow:
  - step: each
    loop: {{in: "{{{{ range({ITEMS}) | list }}}}", iterator: item, spec: {{max_in_flight: 8}}}}
    tool:
      kind: python
      input: {{item: "{{{{ iter.item }}}}"}}
      code: |
        import time
        time.sleep(0.02)
        result = item * 2
"""


OPTIONS = ("--brokers", "3", "--projections", "3", "--workers", "2", "--no-restart")
LONGER_LEASES = {
    "NOETL_SHARD_LEASE_SECONDS": "8",
    "NOETL_SHARD_HEARTBEAT_SECONDS": "1",
}
"""Where nobody is killed no shard may be lost: an owner that had to wait for the processor has not
died."""
OWNED_AGAIN_SECONDS_MAX = 3.0
GAP_SECONDS_MAX = 0.5
LOOK_SECONDS = 0.02
"""A look at all shards and the pause before it, when nobody else has the processor."""


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with running_stack(tmp_path, *OPTIONS) as running:
        yield running


@pytest.fixture
def calm_stack(tmp_path: Path) -> Iterator[Stack]:
    with running_stack(tmp_path, *OPTIONS, **LONGER_LEASES) as running:
        yield running


async def start_load(stack: Stack, loops: int = LOOPS) -> list[int]:
    path = await stack.register(LOOP)
    return [await stack.execute(path) for _ in range(loops)]


async def until(
    holds: Callable[[], Awaitable[bool]], *, seconds: float, what: str = "it did not happen"
) -> float:
    """How long it took."""
    begun = time.monotonic()
    while not await holds():
        assert time.monotonic() - begun < seconds, f"{what} in {seconds} s"
        await asyncio.sleep(0.05)
    return time.monotonic() - begun


async def owners(stack: Stack, role: str) -> dict[int, str | None]:
    rows = await stack.query(
        "SELECT shard_id, CASE WHEN leased_until > now() THEN owner_instance END AS owner"
        " FROM noetl.execution_shard WHERE role = $1 AND retired_at IS NULL",
        role,
    )
    return {row["shard_id"]: row["owner"] for row in rows}


async def shares(stack: Stack, role: str) -> list[int]:
    return sorted(Counter((await owners(stack, role)).values()).values())


def is_shared_by(stack: Stack, *sizes: int) -> Callable[[], Awaitable[bool]]:
    async def holds() -> bool:
        return all([await shares(stack, role) == sorted(sizes) for role in ROLES])

    return holds


async def instance_of(stack: Stack, pid: int) -> str:
    rows = await stack.query(
        "SELECT name FROM noetl.runtime WHERE (runtime->>'pid')::int = $1", pid
    )
    return str(rows[0]["name"])


async def assert_nothing_lost_or_twice(stack: Stack, executions: list[int]) -> None:
    """Every index once, every key once, all completed, and the rows are what a replay gives."""
    for execution_id in executions:
        assert await stack.until_ended(execution_id, seconds=180) == "execution.completed"
        rows = await stack.query(
            "SELECT iter_index, count(*) AS times FROM noetl.event"
            " WHERE execution_id = $1 AND event_type = 'call.done' GROUP BY iter_index",
            execution_id,
        )
        assert {row["iter_index"]: row["times"] for row in rows} == dict.fromkeys(range(ITEMS), 1)
    twice = await stack.query(
        "SELECT execution_id, event_key FROM noetl.event GROUP BY 1, 2 HAVING count(*) > 1"
    )
    assert twice == []
    assert (await stack.query("SELECT count(*) FROM noetl.command"))[0]["count"] == 0
    for execution_id in executions:
        await stack.until_projected(execution_id, "COMPLETED")
        await assert_row_equals_replay(stack, ExecutionId(execution_id))


async def assert_row_equals_replay(stack: Stack, execution_id: ExecutionId) -> None:
    conn = await stack.connect()
    try:
        found = (await execution_projection.standing(conn, [execution_id]))[execution_id]
        expected = None
        for row in await conn.fetch(
            "SELECT * FROM noetl.event WHERE execution_id = $1 ORDER BY event_id", execution_id
        ):
            expected = refold.advance(expected, row, event_of(row))
    finally:
        await conn.close()
    assert expected is not None
    assert execution_projection.differing(found, expected) == ()
    assert found.last_event_id == EventId(expected.last_event_id)


async def test_the_shards_of_killed_owners_are_owned_again_within_three_seconds(
    stack: Stack,
) -> None:
    await until(is_shared_by(stack, 5, 5, 6), seconds=120, what="not balanced")
    executions = await start_load(stack)
    await stack.until_done(executions[0], ITEMS // 4)

    took = await until_owned_again_without(stack, 2)
    print(f"owned again after {took:.2f} s")
    await assert_nothing_lost_or_twice(stack, executions)
    assert took < OWNED_AGAIN_SECONDS_MAX


async def until_owned_again_without(stack: Stack, number: int) -> float:
    """Seconds from the end of a broker and a projection until others have what was theirs."""
    names = [f"{role}-{number}" for role in ROLES]
    dead = {await instance_of(stack, stack.pid(name)) for name in names}
    begun = time.monotonic()
    for name in names:
        stack.kill(name)

    async def is_owned_again() -> bool:
        found = [owner for role in ROLES for owner in (await owners(stack, role)).values()]
        return None not in found and not dead & set(found)

    await until(is_owned_again, seconds=60, what="not owned again")
    return time.monotonic() - begun


async def test_a_fourth_owner_gets_its_fair_share_without_a_gap_and_nothing_else_moves(
    calm_stack: Stack,
) -> None:
    stack = calm_stack
    await until(is_shared_by(stack, 5, 5, 6), seconds=120, what="not balanced")
    executions = await start_load(stack)
    await stack.until_done(executions[0], ITEMS // 6)
    before = {role: await owners(stack, role) for role in ROLES}
    gaps = asyncio.create_task(measure_gaps(stack))

    with (
        another(stack, "broker", **LONGER_LEASES),
        another(stack, "projection", **LONGER_LEASES),
    ):
        took = await until(is_shared_by(stack, 4, 4, 4, 4), seconds=30, what="not balanced")
        for role in ROLES:
            now = await owners(stack, role)
            moved = [shard for shard in now if now[shard] != before[role][shard]]
            assert len(moved) == 4, "more than the fair share has moved"
        longest = await stop(gaps)
        print(f"balanced after {took:.2f} s, longest without an owner {longest * 1000:.0f} ms")
        await assert_nothing_lost_or_twice(stack, executions)
    assert longest < GAP_SECONDS_MAX


async def test_a_broker_that_slept_past_its_lease_is_refused_by_the_fence(stack: Stack) -> None:
    await until(is_shared_by(stack, 5, 5, 6), seconds=120, what="not balanced")
    executions = await start_load(stack)
    await stack.until_done(executions[0], ITEMS // 4)
    pids = {name: stack.pid(name) for name in ("broker-2", "projection-2")}
    asleep = {name: await instance_of(stack, pid) for name, pid in pids.items()}
    held = {name: await held_by(stack, instance) for name, instance in asleep.items()}
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)

    async def is_taken_over() -> bool:
        found = [owner for role in ROLES for owner in (await owners(stack, role)).values()]
        return None not in found and not set(asleep.values()) & set(found)

    try:
        await until(is_taken_over, seconds=60, what="not taken over")
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGCONT)

    await assert_nothing_lost_or_twice(stack, executions)
    assert all(held.values()), "it held nothing: this shows nothing"

    async def is_refused() -> bool:
        return all(lost_by(stack, name) >= shards for name, shards in held.items())

    await until(is_refused, seconds=60, what="it kept what was taken")
    await until(is_shared_by(stack, 5, 5, 6), seconds=120, what="who came back got nothing")


@pytest.mark.parametrize("counts", [(16, 64), (16, 24, 5)], ids=["more", "fewer"])
async def test_the_number_of_shards_changes_under_load(
    stack: Stack, counts: tuple[int, ...]
) -> None:
    await until(is_shared_by(stack, 5, 5, 6), seconds=120, what="not balanced")
    executions = await start_load(stack)
    await stack.until_done(executions[0], ITEMS // 6)

    for count_from, count_to in itertools.pairwise(counts):
        executions += await start_load(stack, 2)
        await stack.until_done(executions[-1], 5)
        await resize(stack, count_from, count_to)

    await assert_nothing_lost_or_twice(stack, executions)
    moved = await stack.query(
        "SELECT execution_id FROM noetl.event GROUP BY 1 HAVING count(DISTINCT shard_id) > 1"
    )
    assert moved, "no execution was under way when the count changed: this has shown nothing"
    print(f"{len(moved)} of {len(executions)} executions were moved while they ran")
    print(f"longest time without an event: {await longest_silence_ms(stack)} ms")
    found = (await stack.client.get("/api/shards")).json()
    assert found["count"] == counts[-1]
    assert found["resize"]["drained_at"] is not None
    staying = [one for one in found["shards"] if not one["is_leaving"]]
    assert len(staying) == 2 * counts[-1]

    async def is_all_owned() -> bool:
        shards = (await stack.client.get("/api/shards")).json()["shards"]
        return all(one["instance"] is not None for one in shards)

    async def is_inbox_empty() -> bool:
        return await stack.query("SELECT FROM noetl.inbox LIMIT 1") == []

    # With leases as short as these a busy machine may cost an owner one, for a moment.
    await until(is_all_owned, seconds=60, what="some shards have no owner")
    await until(is_inbox_empty, seconds=60, what="letters are left")


async def test_owners_go_on_without_a_shard_manager(stack: Stack) -> None:
    await until(is_shared_by(stack, 5, 5, 6), seconds=120, what="not balanced")
    stack.kill("shard-manager")
    executions = await start_load(stack)
    await stack.until_done(executions[0], ITEMS // 4)
    stack.kill("broker-3")
    stack.kill("projection-3")

    await until(is_shared_by(stack, 8, 8), seconds=60, what="not taken over")
    with another(stack, "broker"), another(stack, "projection"):
        await until(is_shared_by(stack, 6, 6, 4), seconds=120, what="not shared")
        await assert_nothing_lost_or_twice(stack, executions)


async def held_by(stack: Stack, instance: str) -> set[tuple[int, int]]:
    rows = await stack.query(
        "SELECT shard_id, epoch FROM noetl.execution_shard WHERE owner_instance = $1", instance
    )
    return {(row["shard_id"], row["epoch"]) for row in rows}


def lost_by(stack: Stack, name: str) -> set[tuple[int, int]]:
    """Shards and epochs that a process says to have lost."""
    lines = [json.loads(line) for line in stack.log(name).splitlines() if "shard.lost" in line]
    return {(line["shard_id"], line["epoch"]) for line in lines}


async def resize(stack: Stack, count_from: int, count_to: int) -> None:
    """By HTTP: the command line would take longer to start than the load to end."""
    body = {"from": count_from, "to": count_to}
    answer = await stack.client.post("/api/shards/resize", json=body)
    assert answer.status_code == 202, answer.text

    async def is_drained() -> bool:
        found = (await stack.client.get("/api/shards")).json()["resize"]
        return found["to"] == count_to and found["drained_at"] is not None

    took = await until(is_drained, seconds=120, what="not drained")
    print(f"resized {count_from} -> {count_to} in {took:.2f} s")


async def longest_silence_ms(stack: Stack) -> int:
    """Between two events of the whole log, around a change of the shard count."""
    rows = await stack.query(
        "SELECT max(silence) AS longest FROM (SELECT created_at, extract(epoch FROM created_at"
        " - lag(created_at) OVER (ORDER BY created_at)) * 1000 AS silence FROM noetl.event) AS e"
        " JOIN noetl.resize AS r"
        " ON e.created_at BETWEEN r.switched_at AND r.switched_at + interval '2 s'"
    )
    return int(rows[0]["longest"])


async def measure_gaps(stack: Stack) -> float:
    """The longest time for which a shard was seen without an owner, until cancelled.

    While we did not look nothing was seen: a look that came late says how busy the machine is.
    """
    conn = await stack.connect()
    since: dict[Any, float] = {}
    longest, looked_at = 0.0, time.monotonic()
    try:
        while True:
            rows = await conn.fetch(
                "SELECT role, shard_id FROM noetl.execution_shard WHERE leased_until IS NULL"
            )
            now = time.monotonic()
            late = max(0.0, now - looked_at - LOOK_SECONDS)
            looked_at = now
            free = {(row["role"], row["shard_id"]) for row in rows}
            since = {one: since[one] + late if one in since else now for one in free}
            longest = max([longest, *(now - at for at in since.values())])
            await asyncio.sleep(0.005)
    except asyncio.CancelledError:
        return longest
    finally:
        await conn.close()


async def stop(task: asyncio.Task[float]) -> float:
    task.cancel()
    return await task


@contextmanager
def another(stack: Stack, service: str, **leases: str) -> Iterator[None]:
    environment = {
        **os.environ,
        **SHORT_LEASES,
        **leases,
        "NOETL_POSTGRES_DSN": stack.info["dsn"],
        "NOETL_NATS_URL": stack.info["nats_url"],
        "NOETL_STORE_DIR": str(Path(stack.data_dir) / "store"),
    }
    with (Path(stack.data_dir) / f"another-{service}.log").open("w") as log:
        process = subprocess.Popen(
            [str(NOETL.with_name("python")), "-m", f"noetl_{service}"],
            env=environment,
            stdout=log,
            stderr=log,
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(timeout=120)
