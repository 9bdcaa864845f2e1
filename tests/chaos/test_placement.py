"""Workers of different size, aimed at, killed and suspended: real processes, short leases."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.msg import Msg

from chaos.stack import SHORT_LEASES, Stack, running_stack
from noetl_broker.placing import WATCH_SECONDS
from noetl_core.wire.subjects import EVENT_STREAM_SUBJECTS

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(900)]

ITEMS = 840
SLOTS = {"share-2": 2, "share-4": 4, "share-8": 8}
PATIENT = {"NOETL_LEASE_SECONDS": "15"}
"""Of who lives on: a worker that had to wait for the processor has not died."""

HEAD = "apiVersion: noetl.io/v2\nkind: Playbook\nmetadata: {{name: {0}, path: tests/{0}}}\n"
SHARE = (
    HEAD.format("share")
    + """
workflow:
  - step: each
    spec: {pool: share}
    loop: {in: "{{ range(840) | list }}", spec: {max_in_flight: 200}}
    tool:
      kind: python
      code: |
        import time
        time.sleep(0.25)
"""
)
AIMED = (
    HEAD.format("aimed")
    + """
workload: {marks: ""}
workflow:
  - step: each
    spec: {pool: aim, placement: {worker: aim-a, wait: 10s}}
    loop: {in: "{{ range(60) | list }}", spec: {max_in_flight: 60}}
    tool:
      kind: python
      input: {item: "{{ iter.item }}"}
      code: |
        import time
        time.sleep(0.15)
        result = item * 2
"""
)
KEYED = (
    HEAD.format("keyed")
    + """
workflow:
  - step: each
    spec: {pool: aim, placement: {affinity: "k{{ iter.item % 4 }}", wait: 30s}}
    loop: {in: "{{ range(80) | list }}", spec: {max_in_flight: 20}}
    tool: {kind: noop}
"""
)
SUSPENDED = (
    HEAD.format("suspended")
    + """
workload: {mark: ""}
workflow:
  - step: one
    spec: {pool: nap}
    loop: {in: [1], spec: {max_in_flight: 1}}
    tool:
      kind: python
      input: {mark: "{{ workload.mark }}", who: "{{ iter.item }}"}
      code: |
        import os, time
        with open(mark, "a") as file:
            file.write(f"{os.getppid()}\\n")
        time.sleep(3.0)
        result = os.getpid()
"""
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("placement"), "--processes") as running:
        yield running


@contextmanager
def another_worker(
    stack: Stack, name: str, pool: str, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    environ = {
        **os.environ,
        **SHORT_LEASES,
        "NOETL_POSTGRES_DSN": stack.info["dsn"],
        "NOETL_NATS_URL": stack.info["nats_url"],
        "NOETL_STORE_DIR": str(Path(stack.data_dir) / "store"),
        "NOETL_INSTANCE": name,
        "NOETL_WORKER_POOL": pool,
        **environment,
    }
    with (stack.data_dir / "logs" / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "noetl_worker"], env=environ, stdout=log, stderr=log
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=120)


async def until_ready(stack: Stack, *names: str, seconds: float = 120.0) -> None:
    sql = "SELECT count(*) FROM noetl.runtime WHERE status = 'ready' AND name = ANY ($1)"
    deadline = time.monotonic() + seconds
    while (await stack.query(sql, list(names)))[0]["count"] < len(names):
        assert time.monotonic() < deadline, f"{names} not ready in {seconds} s"
        await asyncio.sleep(0.1)
    await asyncio.sleep(3 * WATCH_SECONDS)  # until the brokers have seen them, too


async def ends(stack: Stack, execution_id: int) -> list[dict[str, Any]]:
    rows = await stack.query(
        "SELECT event_id, command_id, iter_index, event_type, meta->>'worker_id' AS worker"
        " FROM noetl.event WHERE execution_id = $1 AND event_key LIKE 'end:%' ORDER BY event_id",
        execution_id,
    )
    return [dict(row) for row in rows]


async def test_workers_share_work_in_proportion_to_their_slots(stack: Stack) -> None:
    def sized(name: str) -> Any:
        slots = str(SLOTS[name])
        own = {"NOETL_WORKER_SLOTS": slots, "NOETL_PYTHON_PROCESSES": slots}
        return another_worker(stack, name, "share", **own, **PATIENT)

    with sized("share-2"), sized("share-4"), sized("share-8"):
        await until_ready(stack, *SLOTS)
        execution_id = await stack.execute(await stack.register(SHARE))
        assert await stack.until_ended(execution_id, seconds=120) == "execution.completed"

    done = Counter(end["worker"] for end in await ends(stack, execution_id))
    assert done.total() == ITEMS
    for name, slots in SLOTS.items():
        fair = ITEMS * slots / sum(SLOTS.values())
        assert 0.75 * fair < done[name] < 1.25 * fair, done


async def test_equal_keys_are_run_by_the_same_worker(stack: Stack) -> None:
    with (
        another_worker(stack, "aim-a", "aim", **PATIENT),
        another_worker(stack, "aim-b", "aim", **PATIENT),
    ):
        await until_ready(stack, "aim-a", "aim-b")
        execution_id = await stack.execute(await stack.register(KEYED))
        assert await stack.until_ended(execution_id) == "execution.completed"

    found = {(end["iter_index"] % 4, end["worker"]) for end in await ends(stack, execution_id)}
    assert len(found) == 4, found


async def test_a_targeted_worker_that_is_killed_loses_nothing(stack: Stack) -> None:
    one = {"NOETL_WORKER_SLOTS": "4", "NOETL_PYTHON_PROCESSES": "4"}
    other = another_worker(stack, "aim-b", "aim", **one, **PATIENT)
    with other, another_worker(stack, "aim-a", "aim", **one, **PATIENT) as target:
        await until_ready(stack, "aim-a", "aim-b")
        execution_id = await stack.execute(await stack.register(AIMED))
        await stack.until_done(execution_id, 10)
        before = {end["worker"] for end in await ends(stack, execution_id)}
        target.kill()
        assert await stack.until_ended(execution_id) == "execution.completed"

    ended = await ends(stack, execution_id)
    done = [end for end in ended if end["event_type"] == "call.done"]
    assert before == {"aim-a"}, "as long as it lives, nobody else takes what is meant for it"
    assert sorted(end["iter_index"] for end in done) == list(range(60))
    assert {end["worker"] for end in done} == {"aim-a", "aim-b"}
    lost = [end["command_id"] for end in ended if end["event_type"] == "command.expired"]
    assert 0 < len(lost) <= 4, lost
    assert (await stack.query("SELECT count(*) FROM noetl.command"))[0]["count"] == 0


async def test_a_worker_that_slept_through_its_lease_is_not_believed(
    stack: Stack, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    with another_worker(stack, "nap-a", "nap") as sleeper:
        await until_ready(stack, "nap-a")
        path = await stack.register(SUSPENDED)
        execution_id = await stack.execute(path, {"mark": str(mark)})
        await until_written(mark)
        sleeper.send_signal(signal.SIGSTOP)
        with another_worker(stack, "nap-b", "nap", **PATIENT):
            assert await stack.until_ended(execution_id) == "execution.completed"
            recorded = await ends(stack, execution_id)
            async with without_heartbeats(stack), awaiting_word(stack, "one.1/0#1"):
                sleeper.send_signal(signal.SIGCONT)
            await until_refused(stack, execution_id)
            after = await ends(stack, execution_id)

    assert [(end["command_id"], end["event_type"], end["worker"]) for end in recorded] == [
        ("one.1/0#1", "command.expired", None),
        ("one.1/0#2", "call.done", "nap-b"),
    ]
    assert after == recorded
    assert len(mark.read_text().split()) == 2


@asynccontextmanager
async def without_heartbeats(stack: Stack) -> AsyncIterator[None]:
    """Who wakes learns from its first heartbeat that its command is over, and says nothing of it.
    While nobody can look into the queue, what it has to say comes first."""
    conn = await stack.connect()
    try:
        async with conn.transaction():
            await conn.execute("LOCK TABLE noetl.command")
            yield
    finally:
        await conn.close()


@asynccontextmanager
async def awaiting_word(stack: Stack, command_id: str) -> AsyncIterator[None]:
    """Ends when somebody has told the brokers of this command."""
    said = asyncio.Event()

    async def hear(message: Msg) -> None:
        if command_id.encode() in message.data:
            said.set()

    client = await nats.connect(stack.info["nats_url"])
    try:
        for subject in EVENT_STREAM_SUBJECTS:
            await client.subscribe(subject, cb=hear)
        await client.flush()
        yield
        async with asyncio.timeout(60):
            await said.wait()
    finally:
        await client.close()


async def until_written(mark: Path, *, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not mark.exists():  # noqa: ASYNC240 - nothing else waits for this loop
        assert time.monotonic() < deadline, f"nothing began in {seconds} s"
        await asyncio.sleep(0.02)


async def until_refused(stack: Stack, execution_id: int, *, seconds: float = 60.0) -> None:
    sql = (
        "SELECT actor, subject FROM noetl.audit"
        " WHERE execution_id = $1 AND action = 'completion.refused'"
    )
    deadline = time.monotonic() + seconds
    while not (rows := await stack.query(sql, execution_id)):
        assert time.monotonic() < deadline, f"nothing refused in {seconds} s"
        await asyncio.sleep(0.1)
    assert [tuple(row) for row in rows] == [("nap-a", "one.1/0#1")]
