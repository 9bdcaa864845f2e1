"""Which commands a worker takes: of its pools, for its labels, while its tools have a slot."""

import asyncio
import time

import pytest

from noetl_core.bus.connection import open_bus
from noetl_core.domain.ids import ShardId, WorkerId
from noetl_core.process.config import ConfigError, load_config
from noetl_core.store.command import CommandKey
from noetl_core.store.postgres import Pool
from noetl_core.store.runtime import live_workers
from noetl_core.wire.subjects import worker_wake
from noetl_worker.config import WorkerConfig
from noetl_worker.tool_slots import ToolSlots, read_tool_slots
from services.worker.desk import config, eventually, issue, listening, playbook, register, working

STEPS = playbook(
    """
- step: a
  tool: {kind: noop}
- step: slow
  tool:
    kind: python
    code: |
      import time
      time.sleep(0.4)
- step: slower
  tool: {kind: python, code: "import time; time.sleep(1.5)"}
"""
)


async def change(pool: Pool, key: CommandKey, column: str, value: object) -> None:
    await pool.execute(
        f"UPDATE noetl.command SET {column} = $3 WHERE execution_id = $1 AND command_id = $2",
        *key,
        value,
    )


async def test_a_worker_serves_all_its_pools_and_no_other(
    database: str, pool: Pool, nats_url: str
) -> None:
    catalog_id = await register(pool, STEPS)
    keys = [await issue(pool, catalog_id, "a", index=n) for n in range(3)]
    for key, name in zip(keys, ("cpu", "gpu", "other"), strict=True):
        await change(pool, key, "pool", name)

    several = config(database, nats_url, worker_pool="cpu, gpu")
    async with listening(nats_url, pool) as ear, working(several):
        await eventually(lambda: len(ear.ends) == 2)
        await asyncio.sleep(0.5)

    assert {end.command_id for end in ear.ends} == {keys[0][1], keys[1][1]}


async def test_a_worker_takes_only_what_its_labels_and_tools_allow(
    database: str, pool: Pool, nats_url: str
) -> None:
    catalog_id = await register(pool, STEPS)
    keys = [await issue(pool, catalog_id, "a", index=n) for n in range(3)]
    wanted = (["gpu=true", "tool:noop"], ["gpu=false"], ["tool:acme.mailer"])
    for key, requires in zip(keys, wanted, strict=True):
        await change(pool, key, "requires", requires)

    labelled = config(database, nats_url, worker_labels=("gpu", "zone=eu"))
    async with listening(nats_url, pool) as ear, working(labelled):
        await ear.end_of(keys[0])
        await asyncio.sleep(0.5)

    assert [end.command_id for end in ear.ends] == [keys[0][1]]


async def test_a_worker_says_what_it_is_good_for(database: str, pool: Pool, nats_url: str) -> None:
    told = config(
        database,
        nats_url,
        worker_pool="cpu,gpu",
        worker_labels=("zone=eu",),
        worker_tool_slots=("python=2", "http=50"),
        worker_slots=7,
    )
    async with working(told):
        (found,) = await live_workers(pool)

    assert found.worker_id == "worker-a"
    assert found.pools == {"cpu", "gpu"}
    assert {"zone=eu", "tool:python", "tool:http", "tool:noop"} <= found.offers
    assert found.capacity == 7
    assert found.limited == {"python", "http"}


async def test_a_wake_up_by_name_brings_the_worker_that_is_meant(
    database: str, pool: Pool, nats_url: str
) -> None:
    catalog_id = await register(pool, STEPS)
    sleepy = config(database, nats_url, poll_seconds=30.0)
    async with (
        listening(nats_url, pool) as ear,
        working(sleepy),
        open_bus(nats_url, name="test") as bus,
    ):
        await asyncio.sleep(0.2)
        key = await issue(pool, catalog_id, "a", target_worker="worker-a", target_seconds=60)
        await bus.wake(worker_wake(ShardId(3), WorkerId("worker-a")), b"1")
        await ear.end_of(key)


@pytest.mark.parametrize("is_told", [True, False], ids=["rows that say so", "rows that do not"])
async def test_a_limited_tool_runs_only_so_many_at_a_time(
    database: str, pool: Pool, nats_url: str, is_told: bool
) -> None:
    catalog_id = await register(pool, STEPS)
    for n in range(6):
        key = await issue(pool, catalog_id, "slow", index=n)
        if is_told:
            await change(pool, key, "requires", ["tool:python"])
    limited = config(
        database, nats_url, worker_tool_slots=("python=2",), python_processes=6, worker_slots=20
    )
    running, leased = [0], [0]

    async def watch() -> None:
        while True:
            ended = len(ear.ends)
            held = await pool.fetchval("SELECT count(*) FROM noetl.command WHERE status = 'leased'")
            leased.append(held)
            running.append(len(ear.claims) - ended)
            await asyncio.sleep(0.02)

    quick = await issue(pool, catalog_id, "a")
    async with listening(nats_url, pool) as ear, working(limited):
        watching = asyncio.create_task(watch())
        await ear.end_of(quick)
        assert len(ear.ends) < 6, "what needs no such tool does not wait for it"
        await eventually(lambda: len(ear.ends) == 7)
        watching.cancel()
    spans = [end.duration_ms for end in ear.ends if end.command_id != quick[1]]

    if is_told:
        # Two of the limited kind, the two before them, whose end is on its way, and the quick one.
        assert max(leased) <= 5, "all were leased at once"
    else:
        # They were leased and had to wait here.
        assert max(spans) > 900
    assert len(spans) == 6


def test_slots_are_counted_for_what_is_limited_only() -> None:
    slots = ToolSlots({"python": 2, "http": 5})
    slots.take(["tool:python", "gpu=true"])
    assert (slots.most_at_once(), slots.full()) == (1, frozenset())
    slots.take(["tool:python"])
    assert (slots.most_at_once(), slots.full()) == (5, frozenset({"tool:python"}))
    slots.give_back(["tool:python"])
    slots.take(None)

    assert slots.most_at_once() == 1
    assert ToolSlots({}).most_at_once() is None


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (("pyhton=2",), "no tool of kind 'pyhton' here; there are: http, python"),
        (("python",), "'python' is not such as python=2"),
        (("python=0",), "'python=0' is not such as python=2"),
    ],
)
def test_slots_of_tools_that_make_no_sense_stop_the_worker(
    given: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_tool_slots(given, {"python", "http"})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"NOETL_WORKER_POOL": "cpu,,gpu"}, "NOETL_WORKER_POOL='cpu,,gpu': a pool is a name"),
        ({"NOETL_WORKER_LABELS": "a:b=1"}, "NOETL_WORKER_LABELS: a:b=1 is no label"),
    ],
)
def test_pools_and_labels_that_nothing_could_match_stop_the_worker(
    fields: dict[str, str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(WorkerConfig, fields | {"NOETL_POSTGRES_DSN": "dsn"})


async def test_a_worker_that_stops_leaves_what_was_meant_for_it_to_others_at_once(
    database: str, pool: Pool, nats_url: str
) -> None:
    catalog_id = await register(pool, STEPS)
    busy = config(database, nats_url, instance="a", worker_slots=1, drain_seconds=10.0)
    other = config(database, nats_url, instance="b")
    async with listening(nats_url, pool) as ear, working(other):
        async with working(busy):
            slow = await issue(pool, catalog_id, "slower", target_worker="a", target_seconds=60)
            await eventually(lambda: ear.claims)
            meant = await issue(pool, catalog_id, "a", target_worker="a", target_seconds=60)
        left_at = time.monotonic()
        end = await ear.end_of(meant)

        assert (await ear.end_of(slow)).worker_id == "a"
        assert end.worker_id == "b"
        assert time.monotonic() - left_at < 30, "not after the minute that was its own"
