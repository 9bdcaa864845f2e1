"""What is leased to a worker without its knowing comes back by itself; nothing else does."""

import asyncio
from typing import Any

import pytest

from noetl_core.domain.ids import WorkerId
from noetl_core.store import command
from noetl_core.store.postgres import Pool
from services.worker.desk import (
    WAIT_SECONDS,
    config,
    eventually,
    issue,
    listening,
    playbook,
    register,
    until,
    working,
)

STEPS = playbook(
    """
- step: a
  tool: {kind: noop}
- step: slow
  tool:
    kind: python
    code: |
      import time
      time.sleep(2)
"""
)
OURS = WorkerId("worker-a")


async def test_a_lease_whose_answer_was_lost_is_given_back_and_what_runs_is_kept(
    database: str, pool: Pool, nats_url: str
) -> None:
    catalog_id = await register(pool, STEPS)
    async with listening(nats_url, pool) as ear, working(config(database, nats_url)):
        runs = await issue(pool, catalog_id, "slow")
        await eventually(lambda: ear.claims)
        lost = await issue(pool, catalog_id, "a", index=1, delay=60)
        await pool.execute(
            "UPDATE noetl.command SET status = 'leased', worker_id = $1, last_heartbeat = now(),"
            " lease_until = now() + interval '5 s' WHERE command_id = $2",
            OURS,
            lost[1],
        )

        await until(pool, "SELECT bool_or(given_back) FROM noetl.command")

        rows = await pool.fetch("SELECT command_id FROM noetl.command WHERE given_back")
        assert [row[0] for row in rows] == [lost[1]]
        assert [row.command_id for row in await command.expired(pool, limit=1000)] == [lost[1]]
        assert await ear.done(runs) is None


async def test_what_a_lease_under_way_will_bring_is_not_given_back(
    database: str, pool: Pool, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = command.lease

    async def answered_late(*given: Any, **more: Any) -> list[command.Leased]:
        leased = await whole(*given, **more)
        await asyncio.sleep(1.5 if leased else 0)
        return leased

    monkeypatch.setattr(command, "lease", answered_late)
    catalog_id = await register(pool, STEPS)
    often = config(database, nats_url, heartbeat_seconds=0.05)
    async with listening(nats_url, pool) as ear, working(often):
        await asyncio.sleep(0.5)
        key = await issue(pool, catalog_id, "a")
        async with asyncio.timeout(WAIT_SECONDS):
            while not ear.ends:
                assert not await pool.fetchval("SELECT bool_or(given_back) FROM noetl.command")
                await asyncio.sleep(0.02)
        assert await ear.done(key) is None


async def test_a_lease_that_ran_out_is_left_to_the_reaper(pool: Pool) -> None:
    key = await issue(pool, await register(pool, STEPS), "a")
    await command.lease(pool, OURS, ["cpu"], limit=1, lease_seconds=60)
    await command.give_up_all(pool, OURS)
    look = await command.give_back_strays(pool, OURS, [], leased_before=None, lease_seconds=60)

    found = await command.give_back_strays(
        pool, OURS, [], leased_before=look.looked_at, lease_seconds=60
    )

    assert found.given_back == 0, "our predecessor may have died of it"
    assert [
        (row.execution_id, row.command_id) for row in await command.expired(pool, limit=1000)
    ] == [key]


async def test_only_what_was_leased_before_the_look_and_is_not_held_is_given_back(
    pool: Pool,
) -> None:
    catalog_id = await register(pool, STEPS)
    for n in range(3):
        await issue(pool, catalog_id, "a", index=n)
    held, lost = await command.lease(pool, OURS, ["cpu"], limit=2, lease_seconds=60)
    look = await command.give_back_strays(pool, OURS, [], leased_before=None, lease_seconds=60)
    await command.lease(pool, OURS, ["cpu"], limit=1, lease_seconds=60)

    found = await command.give_back_strays(
        pool, OURS, [held.key], leased_before=look.looked_at, lease_seconds=60
    )

    assert (look.given_back, found.given_back) == (0, 1)
    rows = await pool.fetch("SELECT command_id FROM noetl.command WHERE given_back")
    assert [row[0] for row in rows] == [lost.command_id]
