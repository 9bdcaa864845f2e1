"""A whole worker against a real Postgres and a real NATS: nothing is lost, nothing runs twice."""

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest

from noetl_core.bus.connection import open_bus
from noetl_core.domain.ids import ShardId, worker_id_of
from noetl_core.process.config import ConfigError, load_config
from noetl_core.process.secrets import generate_key, load_keyring
from noetl_core.store import credential
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import BODY_BYTES_MAX, Done
from noetl_core.wire.subjects import pool_wake
from noetl_worker import emit, held
from noetl_worker.config import WorkerConfig
from noetl_worker.tools.noop import NoopTool
from noetl_worker.tools.tool import ToolCall, ToolResult
from services.worker.desk import (
    Ear,
    all_confirmed,
    config,
    eventually,
    issue,
    listening,
    playbook,
    register,
    remove,
    working,
)
from support.nats import NatsServer

NOOP = playbook("- step: a\n  input: {x: 1}\n  tool: {kind: noop}")
NAP = playbook("- step: a\n  tool: {kind: shell, command: sleep 0.2}")
SLEEP = playbook(
    """
- step: a
  tool:
    kind: python
    code: |
      import time
      time.sleep(30)
"""
)


async def test_a_command_is_claimed_done_and_gone(database: str, pool: Pool, nats_url: str) -> None:
    key = await issue(pool, await register(pool, NOOP), "a")

    async with listening(nats_url, pool) as ear, working(config(database, nats_url)):
        assert await ear.done(key) == {"x": 1}

    assert [c.command_id for c in ear.claims] == [key[1]]
    assert {m.worker_id for m in (*ear.claims, *ear.ends)} == {"worker-a"}


async def test_a_quick_command_reports_claim_and_end_in_one_message(
    database: str, pool: Pool, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How quick is quick is not the question here.
    monkeypatch.setattr(emit, "CLAIM_WAIT_SECONDS", 5.0)
    catalog_id = await register(pool, NOOP)
    for n in range(10):
        await issue(pool, catalog_id, "a", index=n, element=n)

    async with listening(nats_url, pool) as ear, working(config(database, nats_url)):
        await eventually(lambda: len(ear.ends) == 10)

    assert len(ear.batches) == 1
    assert len(ear.claims) == 10


async def test_a_tool_that_says_it_was_cancelled_though_nobody_stopped_it_has_failed(
    database: str, pool: Pool, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancelled_by_its_library(_tool: NoopTool, _call: ToolCall) -> ToolResult:
        waited_for = asyncio.get_running_loop().create_future()
        waited_for.cancel()
        return ToolResult(await waited_for)

    monkeypatch.setattr(NoopTool, "run", cancelled_by_its_library)
    key = await issue(pool, await register(pool, NOOP), "a")

    async with listening(nats_url, pool) as ear, working(config(database, nats_url)):
        failed = await ear.failed(key)

    assert failed.error.kind == "internal"
    assert "not by the worker" in failed.error.message


async def test_two_workers_never_run_the_same_command(
    database: str, pool: Pool, nats_url: str
) -> None:
    catalog_id = await register(pool, NAP)

    async with (
        listening(nats_url, pool) as ear,
        working(config(database, nats_url, instance="worker-a", worker_slots=4)),
        working(config(database, nats_url, instance="worker-b", worker_slots=4)),
    ):
        keys = [await issue(pool, catalog_id, "a", index=n, element=n) for n in range(60)]
        await eventually(lambda: len(ear.ends) >= len(keys))
        await asyncio.sleep(0.1)

    assert Counter(m.command_id for m in ear.ends) == Counter(key[1] for key in keys)
    assert {m.worker_id for m in ear.ends} == {"worker-a", "worker-b"}


async def test_a_lost_wake_up_only_costs_the_poll(database: str, pool: Pool, nats_url: str) -> None:
    catalog_id = await register(pool, NOOP)

    async with listening(nats_url, pool) as ear, working(config(database, nats_url)):
        await asyncio.sleep(0.1)
        started = time.monotonic()
        await ear.end_of(await issue(pool, catalog_id, "a"))
        elapsed = time.monotonic() - started

    assert elapsed < 20


async def test_a_wake_up_brings_a_worker_that_would_poll_much_later(
    database: str, pool: Pool, nats_url: str
) -> None:
    catalog_id = await register(pool, NOOP)
    slow = config(database, nats_url, poll_seconds=30.0)

    async with (
        listening(nats_url, pool) as ear,
        working(slow),
        open_bus(nats_url, name="test") as bus,
    ):
        await asyncio.sleep(0.2)
        key = await issue(pool, catalog_id, "a")
        await bus.wake(pool_wake(ShardId(5), "cpu"), b"1")
        started = time.monotonic()
        await ear.end_of(key)
        elapsed = time.monotonic() - started

    assert elapsed < 20


async def test_one_wake_up_for_many_commands_brings_the_other_worker_too(
    database: str, pool: Pool, nats_url: str
) -> None:
    catalog_id = await register(pool, SLEEP)
    few = {"poll_seconds": 30.0, "worker_slots": 2, "python_processes": 2, "drain_seconds": 0.0}

    async with (
        listening(nats_url, pool) as ear,
        working(config(database, nats_url, instance="worker-a", **few)),
        working(config(database, nats_url, instance="worker-b", **few)),
        open_bus(nats_url, name="test") as bus,
    ):
        await asyncio.sleep(0.2)
        for n in range(4):
            await issue(pool, catalog_id, "a", index=n, element=n)
        # Who hears it is chance: a worker that hears its own forwarded wake-up halves it.
        for _ in range(3):
            await bus.wake(pool_wake(ShardId(5), "cpu"), b"64")
        await eventually(lambda: len(ear.claims) == 4)

    assert {c.worker_id for c in ear.claims} == {"worker-a", "worker-b"}


async def test_a_delayed_command_starts_when_it_is_due_and_not_before(
    database: str, pool: Pool, nats_url: str
) -> None:
    catalog_id = await register(pool, NOOP)
    issued = time.monotonic()
    key = await issue(pool, catalog_id, "a", delay=0.6)

    async with (
        listening(nats_url, pool) as ear,
        working(config(database, nats_url, poll_seconds=30.0)),
    ):
        await ear.end_of(key)
        elapsed = time.monotonic() - issued

    assert 0.6 <= elapsed < 20


async def test_without_nats_results_take_the_inbox_and_nothing_is_lost(
    database: str, pool: Pool, own_nats: NatsServer
) -> None:
    catalog_id = await register(pool, NOOP)
    ear = Ear(pool)
    own_nats.stop()

    async with working(config(database, own_nats.url)):
        key = await issue(pool, catalog_id, "a")
        while not ear.ends:
            await asyncio.sleep(0.02)
            await ear.drain_inbox()
        assert await ear.done(key) == {"x": 1}
        own_nats.start()
        async with listening(own_nats.url, pool) as fast:
            again = await issue(pool, catalog_id, "a", index=1, element=1)
            await fast.end_of(again)


async def test_a_result_that_is_not_recorded_is_published_again(
    database: str, pool: Pool, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "REPUBLISH_SECONDS_MIN", 0.3)
    key = await issue(pool, await register(pool, NOOP), "a")

    async with listening(nats_url, pool) as ear, working(config(database, nats_url)):
        ear.confirms = False
        await eventually(lambda: len(ear.ends) >= 2)
        first, second, *_ = ear.ends
        await remove(pool, key)
        await all_confirmed()
        await asyncio.sleep(0.5)
        heard = len(ear.ends)
        await asyncio.sleep(1.0)

    assert first == second
    assert len(ear.ends) == heard


async def test_a_command_whose_row_is_gone_is_stopped_and_says_nothing(
    database: str, pool: Pool, nats_url: str
) -> None:
    catalog_id = await register(pool, SLEEP)
    key = await issue(pool, catalog_id, "a")
    one = config(database, nats_url, worker_slots=1, python_processes=1)

    async with listening(nats_url, pool) as ear, working(one):
        await eventually(lambda: ear.claims)
        await asyncio.sleep(0.1)
        await remove(pool, key)
        # The slot is free again although the code would have gone on for half a minute.
        noop = await register(pool, NOOP, catalog_id=2)
        following = await issue(pool, noop, "a", index=1)
        await ear.end_of(following)

    assert [m.command_id for m in ear.ends] == [following[1]]


async def test_leases_are_renewed_while_the_loop_is_busy(
    database: str, pool: Pool, nats_url: str
) -> None:
    await issue(pool, await register(pool, SLEEP), "a")
    read = "SELECT extract(epoch FROM last_heartbeat)::float8 FROM noetl.command"

    async with listening(nats_url, pool) as ear, working(config(database, nats_url)):
        await eventually(lambda: ear.claims)
        before = await pool.fetchval(read)
        # The loop of this test is the loop of the worker: nothing on it moves for two seconds.
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            sum(range(1000))
        after = await pool.fetchval(read)

    assert after - before > 0.5


async def test_a_stopping_worker_ends_what_runs_and_gives_up_what_does_not_end(
    database: str, pool: Pool, nats_url: str
) -> None:
    short = playbook(
        """
- step: a
  tool: {kind: python, code: "import time; time.sleep(0.5); result = 1"}
- step: b
  tool: {kind: python, code: "import time; time.sleep(60)"}
"""
    )
    catalog_id = await register(pool, short)
    ends = await issue(pool, catalog_id, "a")
    hangs = await issue(pool, catalog_id, "b")
    quick = config(database, nats_url, drain_seconds=5.0, lease_seconds=60.0)

    async with listening(nats_url, pool) as ear:
        async with working(quick):
            await eventually(lambda: len(ear.claims) == 2)
        assert await ear.done(ends) == 1
        left = await pool.fetchrow("SELECT command_id, lease_until <= now() FROM noetl.command")

    assert left is not None
    assert tuple(left) == (hangs[1], True)


async def test_many_results_are_cut_into_messages_that_fit(
    database: str, pool: Pool, nats_url: str
) -> None:
    text = playbook(
        """
- step: a
  input: {text: "{{ 'x' * 60000 }}"}
  tool: {kind: noop}
"""
    )
    catalog_id = await register(pool, text)
    for n in range(24):
        await issue(pool, catalog_id, "a", index=n, element=n)

    async with listening(nats_url, pool) as ear, working(config(database, nats_url)):
        await eventually(lambda: len(ear.ends) == 24)

    sizes = [
        sum(m.stored.size for m in batch if isinstance(m, Done) and m.stored)
        for batch in ear.batches
    ]
    assert len(ear.ends) == 24
    assert max(sizes) < BODY_BYTES_MAX
    assert await pool.fetchval("SELECT count(*) FROM noetl.inbox") == 0


async def test_a_result_that_fits_in_no_message_takes_the_inbox(
    database: str, pool: Pool, nats_url: str
) -> None:
    text = playbook("- step: a\n  tool: {kind: python, code: \"result = 'x' * 700000\"}")
    key = await issue(pool, await register(pool, text), "a")

    async with listening(nats_url, pool) as ear, working(config(database, nats_url)):
        while not ear.ends:
            await asyncio.sleep(0.02)
            await ear.drain_inbox()
        assert await ear.done(key) == "x" * 700_000


async def test_a_large_result_is_in_the_shared_directory_before_anyone_hears_of_it(
    database: str, pool: Pool, nats_url: str, tmp_path: Path
) -> None:
    text = playbook("- step: a\n  tool: {kind: python, code: \"result = 'x' * 700000\"}")
    key = await issue(pool, await register(pool, text), "a")
    stored_here = config(database, nats_url, store_dir=str(tmp_path))

    async with listening(nats_url, pool) as ear, working(stored_here):
        end = await ear.end_of(key)

    assert isinstance(end, Done)
    assert end.stored is not None
    assert end.stored.uri == f"pvc:42/{key[0]}/a.1%231"
    assert (tmp_path / end.stored.uri.removeprefix("pvc:")).stat().st_size == end.stored.size


async def test_a_credential_opens_a_database_and_is_seen_nowhere(
    database: str, pool: Pool, nats_url: str
) -> None:
    key_text = generate_key()
    sealed = load_keyring(key_text).encrypt("pg", {"dsn": database})
    await credential.upsert(pool, "pg", kind="postgres", sealed=sealed)
    text = playbook(
        """
- step: a
  tool: {kind: postgres, auth: pg, query: "SELECT $1::int + 1 AS n", params: [1]}
"""
    )
    key = await issue(pool, await register(pool, text), "a")

    async with (
        listening(nats_url, pool) as ear,
        working(config(database, nats_url, encryption_key=key_text)),
    ):
        assert (await ear.done(key))["rows"] == [{"n": 2}]

    assert database not in str(ear.batches)


def test_a_lease_that_a_heartbeat_cannot_keep_is_refused_at_the_start() -> None:
    environ = {"NOETL_LEASE_SECONDS": "5", "NOETL_HEARTBEAT_SECONDS": "2"}

    with pytest.raises(ConfigError, match="NOETL_LEASE_SECONDS"):
        load_config(WorkerConfig, environ | {"NOETL_POSTGRES_DSN": "dsn"})


def test_a_worker_id_is_one_token_of_a_subject() -> None:
    assert worker_id_of("worker-node.example.com-17") == "worker-node-example-com-17"
