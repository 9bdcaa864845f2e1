"""kill -9 of each part in the middle of a loop of 1,000 items: it completes, each item once."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.stack import SHORT_LEASES, Stack, running_stack
from noetl_core.domain.ids import ExecutionId
from noetl_core.domain.sharding import SHARD_COUNT_DEFAULT, shard_of
from noetl_core.domain.snowflake import NODE_BITS, SEQUENCE_BITS

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(900)]

ITEMS = 1000
RESUME_SECONDS_MAX = 5.0
LOOP = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: chaos, path: tests/chaos}
workflow:
  - step: each
    loop: {in: "{{ range(1000) | list }}", iterator: item, spec: {max_in_flight: 40}}
    tool:
      kind: python
      input: {item: "{{ iter.item }}"}
      code: |
        import time
        time.sleep(0.008)
        result = item * 2
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("chaos"), "--processes") as running:
        yield running


async def start(stack: Stack) -> int:
    return await stack.execute(await stack.register(LOOP))


async def assert_each_item_once(stack: Stack, execution_id: int) -> None:
    rows = await stack.query(
        "SELECT event_type, iter_index, count(*) AS times FROM noetl.event "
        "WHERE execution_id = $1 "
        "AND event_type IN ('call.done', 'loop.done', 'execution.completed') "
        "GROUP BY event_type, iter_index",
        execution_id,
    )
    assert [row["times"] for row in rows] == [1] * (ITEMS + 2)
    assert {r["iter_index"] for r in rows if r["event_type"] == "call.done"} == set(range(ITEMS))
    results = await stack.query(
        "SELECT e.iter_index, r.inline FROM noetl.event e JOIN noetl.result_ref r "
        "ON r.execution_id = e.execution_id AND r.ref_id = e.event_id "
        "WHERE e.execution_id = $1 AND e.event_type = 'call.done'",
        execution_id,
    )
    assert {r["iter_index"]: int(r["inline"]) for r in results} == {n: n * 2 for n in range(ITEMS)}
    left = "SELECT FROM noetl.command WHERE execution_id = $1"
    assert await stack.query(left, execution_id) == []


@pytest.mark.parametrize(
    "part", ["broker", "worker-1", "projection", "api-gateway", "nats", "postgres"]
)
async def test_a_killed_part_costs_time_and_nothing_else(stack: Stack, part: str) -> None:
    pid = stack.pid(part)  # before it starts: asking takes a while, and the loop does not wait
    execution_id = await start(stack)
    await stack.until_done(execution_id, ITEMS // 3)
    os.kill(pid, signal.SIGKILL)

    assert await stack.until_ended(execution_id) == "execution.completed"
    await assert_each_item_once(stack, execution_id)
    await stack.until_projected(execution_id, "COMPLETED")


async def test_a_killed_broker_costs_less_than_five_seconds(stack: Stack) -> None:
    pid = stack.pid("broker")
    execution_id = await start(stack)
    await stack.until_done(execution_id, ITEMS // 2)
    os.kill(pid, signal.SIGKILL)
    killed_at = time.monotonic()
    before = await stack.done(execution_id)
    assert before < ITEMS, "the loop was over before the broker was killed"
    await stack.until_done(execution_id, before + 1)

    took = time.monotonic() - killed_at
    print(f"went on after {took:.2f} s")
    assert took < RESUME_SECONDS_MAX
    assert await stack.until_ended(execution_id) == "execution.completed"
    await assert_each_item_once(stack, execution_id)


async def test_a_broker_that_slept_through_its_lease_writes_nothing(stack: Stack) -> None:
    with another_broker(stack):
        for _ in range(3):
            execution_id = await start_on_a_kept_shard(stack)
            await stack.until_done(execution_id, ITEMS // 4)
            sleeper = await owner_of(stack, execution_id)
            os.kill(sleeper["pid"], signal.SIGSTOP)
            try:
                await until_taken_over(stack, execution_id, sleeper["node"])
                taken_over_at = (await stack.query("SELECT now()"))[0]["now"]
                successor = await owner_of(stack, execution_id)
            finally:
                os.kill(sleeper["pid"], signal.SIGCONT)

            assert await stack.until_ended(execution_id) == "execution.completed"
            await assert_each_item_once(stack, execution_id)
            if await owner_of(stack, execution_id) == successor:
                break
            # On a busy machine its successor may lose the lease, too: then it may write again.
        else:
            raise AssertionError("who took over was succeeded each time")
        writers = await stack.query(
            "SELECT DISTINCT (event_id >> $2) & $3 AS node FROM noetl.event "
            "WHERE execution_id = $1 AND created_at >= $4",
            execution_id,
            SEQUENCE_BITS,
            (1 << NODE_BITS) - 1,
            taken_over_at,
        )
        assert sleeper["node"] not in {row["node"] for row in writers}


class another_broker:  # noqa: N801 - reads as a statement
    """A second broker beside the one that the stack keeps running."""

    def __init__(self, stack: Stack) -> None:
        self._environment = {
            **os.environ,
            **SHORT_LEASES,
            "NOETL_POSTGRES_DSN": stack.info["dsn"],
            "NOETL_NATS_URL": stack.info["nats_url"],
            "NOETL_STORE_DIR": str(Path(stack.data_dir) / "store"),
        }

    def __enter__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "noetl_broker"],
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=120)


async def start_on_a_kept_shard(stack: Stack) -> int:
    """Wait until both brokers have their half, then start on a shard that will not move back.

    Who comes back from sleep is given the upper half of the other's shards, so an execution on a
    lower shard that was the sleeper's stays where it went.
    """
    deadline = time.monotonic() + 120
    while True:
        rows = await stack.query(
            "SELECT owner_runtime_id, count(*) FROM noetl.execution_shard "
            "WHERE role = 'broker' AND leased_until > now() GROUP BY owner_runtime_id"
        )
        if sorted(row["count"] for row in rows) == [8, 8]:
            break
        assert time.monotonic() < deadline, rows
        await asyncio.sleep(0.1)
    while True:
        execution_id = await start(stack)
        if shard_of(ExecutionId(execution_id), shard_count=SHARD_COUNT_DEFAULT) < 8:
            return execution_id
        await stack.client.post(f"/api/executions/{execution_id}/cancel", json={})


async def owner_of(stack: Stack, execution_id: int) -> dict[str, int]:
    """Its node, its process and the epoch under which it owns the shard."""
    rows = await stack.query(
        "SELECT r.node, (r.runtime->>'pid')::integer AS pid, s.epoch "
        "FROM noetl.execution_shard s "
        "JOIN noetl.runtime r ON r.runtime_id = s.owner_runtime_id "
        "WHERE s.role = 'broker' AND s.shard_id = $1",
        shard_of(ExecutionId(execution_id), shard_count=SHARD_COUNT_DEFAULT),
    )
    return dict(rows[0])


async def until_taken_over(stack: Stack, execution_id: int, node: int) -> None:
    deadline = time.monotonic() + 120
    while (await owner_of(stack, execution_id))["node"] == node:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
