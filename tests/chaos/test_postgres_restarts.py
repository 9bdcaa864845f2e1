"""Postgres goes away every 5 to 40 seconds, in every way it can, under 5,000 workflows.

A longer run, with other moments:

    NOETL_CHAOS_WORKFLOWS=100000 NOETL_CHAOS_SECONDS=3600 NOETL_CHAOS_SEED=7 \
        ./task test -- tests/chaos/test_postgres_restarts.py -s
"""

import asyncio
import itertools
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec
import pytest

from chaos.stack import Stack, running_stack
from noetl_core.domain.ids import ExecutionId
from noetl_core.store import refold
from noetl_core.store.postgres import open_pool
from noetl_core.store.refold import Difference
from noetl_core.wire.http import IDEMPOTENCY_HEADER

WORKFLOWS = int(os.environ.get("NOETL_CHAOS_WORKFLOWS", "5000"))
SECONDS = float(os.environ.get("NOETL_CHAOS_SECONDS", "165"))
"""Over which they are submitted, evenly; Postgres is restarted as long as that lasts."""
SEED = int(os.environ.get("NOETL_CHAOS_SEED", "8"))
"""Of the moments and the ways. This one gives eleven restarts in the time above."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.chaos,
    pytest.mark.timeout(1200 + 3 * SECONDS + WORKFLOWS / 10),
]

PAUSE_SECONDS = (5.0, 40.0)
WAYS = {
    "killed": signal.SIGKILL,  # the postmaster: its sessions notice that, and end
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}
RESTARTS_MIN = 6
SILENCE_SECONDS_MAX = 20.0
"""From the last event before a restart to the first one after it. Most of it is Postgres itself,
which syncs and reads its files after a crash; measured: 1 to 6 s, and 12 s beside much else."""
OWN_SECONDS_MAX = 5.0
"""From the moment that Postgres accepts connections; measured: 0.2 to 0.8 s."""
CLIENTS = 24
TWICE_EVERY = 25
"""One of so many requests is sent twice at the same moment."""
OPTIONS = ("--workers", "2", "--brokers", "2", "--projections", "2")
LEASES = {
    # Those of `noetl dev`: a Postgres that is away must not look like a worker that is.
    "NOETL_SHARD_LEASE_SECONDS": "5",
    "NOETL_SHARD_HEARTBEAT_SECONDS": "1",
    "NOETL_LEASE_SECONDS": "10",
    "NOETL_HEARTBEAT_SECONDS": "2",
    "NOETL_REAPER_INTERVAL_SECONDS": "1",
    "NOETL_REAPER_LEASE_GRACE_SECONDS": "2",
}

PLAYBOOKS = {
    "steps": """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: steps, path: tests/restart_steps}
workload: {number: 0}
workflow:
  - step: begin
    tool: {kind: noop, value: {number: "{{ workload.number }}"}}
    next: {arcs: [{step: work}]}
  - step: work
    tool:
      kind: python
      input: {number: "{{ begin.number }}"}
      code: "result = {'twice': number * 2}"
    next: {arcs: [{step: end}]}
  - step: end
    tool: {kind: noop, value: "{{ work.twice + 1 }}"}
""",
    "loop": """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: loop, path: tests/restart_loop}
workload: {number: 0}
workflow:
  - step: begin
    tool: {kind: noop, value: {number: "{{ workload.number }}"}}
    next: {arcs: [{step: work}]}
  - step: work
    loop: {in: "{{ range(10) | list }}", iterator: item, spec: {max_in_flight: 4}}
    tool: {kind: noop, value: "{{ begin.number }}"}
    next: {arcs: [{step: end}]}
  - step: end
    tool: {kind: noop, value: "{{ work.results | sum }}"}
""",
    "nap": """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: nap, path: tests/restart_nap}
workflow:
  - step: nap
    tool: {kind: python, code: "import time; time.sleep(5)"}
""",
}


def kind_of(number: int) -> str:
    return "loop" if number % 10 == 0 else "steps"


def result_of(number: int) -> int:
    return number * 10 if kind_of(number) == "loop" else number * 2 + 1


class Client:
    """Does what a client has to do: asks again with the same key until it has an answer."""

    def __init__(self, url: str) -> None:
        self.promised: dict[int, int] = {}
        """The execution of each workflow, as a 202 has said."""
        self.repeats: Counter[str] = Counter()
        self._http = httpx.AsyncClient(base_url=url, timeout=3.0)

    async def submit(self, numbers: Iterator[int], *, begun: float) -> None:
        for number in numbers:
            await asyncio.sleep(max(0.0, begun + SECONDS * number / WORKFLOWS - time.monotonic()))
            times = 2 if number % TWICE_EVERY == 0 else 1
            ids = await asyncio.gather(*(self._start(number) for _ in range(times)))
            assert len(set(ids)) == 1, f"workflow {number} was promised as {ids}"
            self.promised[number] = ids[0]

    async def _start(self, number: int) -> int:
        body = {"path": f"tests/restart_{kind_of(number)}", "payload": {"number": number}}
        headers = {IDEMPOTENCY_HEADER: f"workflow-{number}"}
        for failures in itertools.count():
            try:
                answer = await self._http.post("/api/execute", json=body, headers=headers)
            except httpx.TransportError as error:
                self.repeats[type(error).__name__] += 1
            else:
                if answer.status_code == 202:
                    return int(answer.json()["execution_id"])
                assert answer.status_code == 503, answer.text
                self.repeats["503"] += 1
            await asyncio.sleep(min(1.0, 0.1 * 2**failures))
        raise AssertionError("unreachable")

    async def close(self) -> None:
        await self._http.aclose()


class Restart(NamedTuple):
    way: str
    at: float


async def restart_until(stack: Stack, done: asyncio.Event) -> list[Restart]:
    """Again and again, at moments and in ways that only the seed decides."""
    chance = random.Random(SEED)
    happened: list[Restart] = []
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(chance.uniform(*PAUSE_SECONDS)):
                await done.wait()
        if done.is_set():
            return happened
        way = chance.choice(list(WAYS))
        happened.append(Restart(way, time.time()))
        os.kill(stack.parts()["postgres"], WAYS[way])


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with running_stack(tmp_path, *OPTIONS, **LEASES) as running:
        yield running


async def test_five_thousand_workflows_complete_while_postgres_is_restarted_again_and_again(
    stack: Stack,
) -> None:
    for content in PLAYBOOKS.values():
        await stack.register(content)
    expected = {kind: await keys_of_one(stack, kind) for kind in ("steps", "loop")}
    parts = stack.parts()
    client, done = Client(stack.url), asyncio.Event()
    restarting = asyncio.create_task(restart_until(stack, done))
    begun = time.monotonic()
    numbers = iter(range(1, WORKFLOWS + 1))
    await asyncio.gather(*(client.submit(numbers, begun=begun) for _ in range(CLIENTS)))
    submitted_seconds = time.monotonic() - begun
    done.set()
    restarts = await restarting
    await until_all_ended(stack, WORKFLOWS + len(expected))
    ended_seconds = time.monotonic() - begun
    await client.close()
    silences = await silences_after(stack, restarts)
    own = await own_after(stack, restarts)
    print(
        f"\n{WORKFLOWS} workflows submitted in {submitted_seconds:.0f} s, ended after"
        f" {ended_seconds:.0f} s; requests repeated: {dict(client.repeats)};"
        f" {len(restarts)} restarts, silence after each (and since Postgres was ready):"
    )
    for restart, silence, since_ready in zip(restarts, silences, own, strict=True):
        print(f"  {restart.way:<9} {silence:.1f} s ({since_ready:.1f} s)")

    await assert_each_ran_once(stack, client.promised, expected)
    await assert_nothing_is_left(stack)
    await assert_rows_are_what_the_log_says(stack, client.promised)
    moved = {name for name, pid in stack.parts().items() if parts[name] != pid}
    assert moved == {"postgres"}, "another process has died with it"
    await assert_control_goes_on(stack)
    assert len(restarts) >= RESTARTS_MIN
    assert max(silences) < SILENCE_SECONDS_MAX
    assert max(own) < OWN_SECONDS_MAX


async def keys_of_one(stack: Stack, kind: str) -> Counter[str]:
    """What a workflow of the kind records while nothing happens."""
    execution_id = await stack.execute(f"tests/restart_{kind}", {"number": 1})
    assert await stack.until_ended(execution_id) == "execution.completed"
    return (await keys_by_execution(stack))[execution_id]


_KEYS = """
SELECT execution_id, event_type || ' ' || event_key AS key FROM noetl.event
WHERE event_type <> 'checkpoint.committed'
"""


async def keys_by_execution(stack: Stack) -> dict[int, Counter[str]]:
    found: dict[int, Counter[str]] = defaultdict(Counter)
    for row in await stack.query(_KEYS):
        found[row["execution_id"]][row["key"]] += 1
    return found


async def until_all_ended(stack: Stack, count: int, *, seconds: float = 600.0) -> None:
    sql = "SELECT count(*) FROM noetl.event WHERE event_key = 'end'"
    deadline = time.monotonic() + seconds
    while (ended := (await stack.query(sql))[0]["count"]) < count:
        assert time.monotonic() < deadline, f"{ended} of {count} ended in {seconds} s"
        await asyncio.sleep(0.25)


async def commits(stack: Stack) -> list[float]:
    rows = await stack.query(
        "SELECT DISTINCT extract(epoch FROM created_at)::float8 AS at FROM noetl.event ORDER BY 1"
    )
    return [row["at"] for row in rows]


async def silences_after(stack: Stack, restarts: list[Restart]) -> list[float]:
    """Seconds between the last commit before each restart and the first one after it."""
    pairs = list(itertools.pairwise(await commits(stack)))
    return [
        max(after - before for before, after in pairs if after > one.at and before < one.at + 2.0)
        for one in restarts
    ]


async def own_after(stack: Stack, restarts: list[Restart]) -> list[float]:
    """Seconds between the moment at which Postgres was ready again and the next commit."""
    ready = [
        datetime.fromisoformat(line[:23] + "+00:00").timestamp()
        for line in stack.log("postgres").splitlines()
        if line.endswith("database system is ready to accept connections")
    ]
    committed = await commits(stack)
    moments = [next(at for at in ready if at > one.at) for one in restarts]
    return [next(at for at in committed if at > moment) - moment for moment in moments]


_RESULTS = """
SELECT e.execution_id, r.inline FROM noetl.event e
JOIN noetl.result_ref r ON r.execution_id = e.execution_id AND r.ref_id = e.event_id
WHERE e.node_name = 'end' AND e.event_type = 'call.done'
"""


async def assert_each_ran_once(
    stack: Stack, promised: dict[int, int], expected: dict[str, Counter[str]]
) -> None:
    """Each promise is one execution, with every key that it should have and no other."""
    assert len(promised) == len(set(promised.values())) == WORKFLOWS
    found = await keys_by_execution(stack)
    assert len(found) == WORKFLOWS + len(expected), "something ran that was promised to nobody"
    odd = {
        number: (found[one] - keys, keys - found[one])
        for number, one in promised.items()
        if found[one] != (keys := expected[kind_of(number)])
    }
    assert not odd, (len(odd), dict(itertools.islice(odd.items(), 5)))
    results = {row["execution_id"]: row["inline"] for row in await stack.query(_RESULTS)}
    assert {n: msgspec.json.decode(results[one]) for n, one in promised.items()} == {
        n: result_of(n) for n in promised
    }


async def assert_nothing_is_left(stack: Stack) -> None:
    for table in ("command", "inbox", "timer", "dead_letter"):
        assert await stack.query(f"SELECT * FROM noetl.{table} LIMIT 3") == [], table


async def assert_rows_are_what_the_log_says(stack: Stack, promised: dict[int, int]) -> None:
    sql = "SELECT status, count(*) FROM noetl.execution GROUP BY 1"
    deadline = time.monotonic() + 120
    while {row["status"] for row in await stack.query(sql)} != {"COMPLETED"}:
        assert time.monotonic() < deadline, "the projection has not caught up"
        await asyncio.sleep(0.1)
    executions = iter(promised.values())
    async with open_pool(stack.info["dsn"], role="", size_max=4) as pool:

        async def compare() -> list[Difference | None]:
            return [await refold.compare(pool, ExecutionId(one)) for one in executions]

        compared = [
            one for part in await asyncio.gather(*(compare() for _ in range(4))) for one in part
        ]
    assert len(compared) == WORKFLOWS
    assert [one for one in compared if one is not None] == []


async def assert_control_goes_on(stack: Stack) -> None:
    """Every lease is held, and epochs are closed and recorded."""
    leaders = {"shard-manager", "reaper", "checkpointer", "compactor"}
    leading = "SELECT role FROM noetl.leader WHERE leased_until > now()"
    owned = "SELECT bool_and(coalesce(leased_until > now(), false)) FROM noetl.execution_shard"
    deadline = time.monotonic() + 60
    while {row["role"] for row in await stack.query(leading)} != leaders or (
        await stack.query(owned)
    )[0][0] is not True:
        assert time.monotonic() < deadline, "not every lease is held"
        await asyncio.sleep(0.1)
    execution_id = await stack.execute("tests/restart_nap")
    deadline = time.monotonic() + 60
    while not await stack.query(
        "SELECT FROM noetl.checkpoint WHERE execution_id = $1", execution_id
    ):
        assert time.monotonic() < deadline, "no epoch was recorded"
        await asyncio.sleep(0.1)
