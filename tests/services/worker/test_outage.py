"""A Postgres that crashes: a lease that it forgets, and one whose answer is lost."""

import asyncio
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from noetl_core.domain.ids import WorkerId
from noetl_core.store import command
from noetl_core.store.command import Leased
from noetl_core.store.postgres import Pool
from noetl_worker.metrics import TALLY
from services.worker.desk import config, eventually, issue, listening, playbook, register, working
from store.test_command import forget_leases

LEASE_SECONDS = 60.0
MARKED = playbook(
    """
- step: a
  tool:
    kind: python
    code: |
      import time
      with open("MARK", "a") as file:
          file.write("run\\n")
      time.sleep(1.5)
"""
)


@pytest.mark.parametrize("beats", [0.1, 20.0], ids=["heartbeat first", "lease first"])
async def test_a_command_whose_lease_is_forgotten_runs_on_and_runs_once(
    database: str, pool: Pool, nats_url: str, tmp_path: Path, beats: float
) -> None:
    mark = tmp_path / "mark"
    key = await issue(pool, await register(pool, MARKED.replace("MARK", str(mark))), "a")
    # Who beats first has the lease back before the next look; else the look takes it again.
    looks = 0.05 if beats > 1 else 30.0
    one = config(
        database,
        nats_url,
        heartbeat_seconds=beats,
        lease_seconds=LEASE_SECONDS,
        poll_seconds=looks,
        poll_away_seconds=looks,
    )

    async with listening(nats_url, pool) as ear, working(one):
        await eventually(mark.exists)
        await forget_leases(pool)
        await ear.end_of(key)
        await asyncio.sleep(0.5)

        assert TALLY.held is not None
        assert TALLY.held.running == 0
        assert TALLY.held.unconfirmed <= 1

    assert mark.read_text() == "run\n"
    assert len(ear.ends) == 1
    assert await pool.fetchval("SELECT count(*) FROM noetl.command") == 0


async def test_what_was_leased_without_an_answer_is_run_before_its_lease_is_over(
    database: str, pool: Pool, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog_id = await register(pool, playbook("- step: a\n  tool: {kind: noop}"))
    lost: list[Leased] = []
    lease = command.lease

    async def lease_and_lose_the_answer(*arguments: Any, **options: Any) -> list[Leased]:
        found = await lease(*arguments, **options)
        if found and not lost:
            lost.extend(found)
            raise asyncpg.ConnectionDoesNotExistError("connection was closed")
        return found

    monkeypatch.setattr(command, "lease", lease_and_lose_the_answer)
    keys = [await issue(pool, catalog_id, "a", index=n) for n in range(3)]
    one = config(database, nats_url, lease_seconds=LEASE_SECONDS)

    async with listening(nats_url, pool) as ear, working(one):
        for key in keys:
            await ear.end_of(key)

    assert lost
    assert len(ear.ends) == len(keys)


async def test_what_a_killed_predecessor_held_is_not_taken_up_when_the_first_answer_is_lost(
    database: str, pool: Pool, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog_id = await register(pool, playbook("- step: a\n  tool: {kind: noop}"))
    for n in range(3):
        await issue(pool, catalog_id, "a", index=n)
    one = config(database, nats_url, lease_seconds=LEASE_SECONDS)
    await command.lease(pool, WorkerId(one.instance), ["cpu"], limit=3, lease_seconds=LEASE_SECONDS)
    own = await issue(pool, catalog_id, "a", index=3)
    failures = [asyncpg.ConnectionDoesNotExistError("connection was closed")]
    lease = command.lease

    async def lease_at_the_second_try(*arguments: Any, **options: Any) -> list[Leased]:
        if failures:
            raise failures.pop()
        return await lease(*arguments, **options)

    monkeypatch.setattr(command, "lease", lease_at_the_second_try)
    async with listening(nats_url, pool) as ear, working(one):
        await ear.end_of(own)

    assert [claim.command_id for claim in ear.claims] == [own[1]]
