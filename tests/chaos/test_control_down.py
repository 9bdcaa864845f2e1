"""The services that keep the others running are away: what runs goes on, and they catch up later.

While the reaper is away no timer goes off and no dead worker is noticed; that waits for it. All
else needs none of them.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from chaos import mixed_load
from chaos.mixed_load import Log
from chaos.stack import Stack, running_stack
from chaos.test_nats_outages import without_attempts
from chaos.test_shards import another, is_shared_by, until
from flow.conftest import PATIENT_LEASES
from support.flow import Flow

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(900)]

CONTROL = ("shard-manager", "reaper", "checkpointer", "compactor")
OPTIONS = ("--brokers", "2", "--projections", "2", "--workers", "2", "--no-restart")
# Commands are patient, shards are not: an owner that was killed is to be missed soon.
LEASES = {
    **PATIENT_LEASES,
    "NOETL_SHARD_LEASE_SECONDS": "4",
    "NOETL_SHARD_HEARTBEAT_SECONDS": "1",
}


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with running_stack(tmp_path, *OPTIONS, **LEASES) as started:
        yield started


async def test_everything_goes_on_without_any_of_them_and_owners_take_over_from_the_dead(
    stack: Stack, api: str, usual: Log
) -> None:
    flow = Flow(stack, api)
    await mixed_load.prepare(flow)
    await until(is_shared_by(stack, 8, 8), seconds=120, what="not shared")
    parts = stack.parts()
    returned = ExitStack()

    async def disturb() -> None:
        for name in (*CONTROL, "broker-2", "projection-2"):
            os.kill(parts[name], signal.SIGKILL)
        took = await until(is_shared_by(stack, 16), seconds=120, what="not taken over")
        print(f"\nowned again after {took:.1f} s")

    async def mend() -> None:
        # The family that was started without a reaper comes to its timers, and stays there. (The
        # other timer may have gone off before: how long half of the loop takes says the machine.)
        await until(partial(is_waiting, stack), seconds=120, what="they do not wait")
        for name in CONTROL:
            returned.enter_context(another(stack, name.replace("-", "_")))

    with returned:
        run = await mixed_load.run(flow, disturb, mend=mend)
        print(f"without control until all else had ended: {run}")
        await until_led_by_the_living(stack)
        await assert_epochs_are_recorded(stack)
        await until_offline(stack, "broker-2", "projection-2")
    await stack.client.aclose()

    assert run.log == usual


async def test_a_dead_worker_is_noticed_when_the_reaper_is_back(
    stack: Stack, api: str, usual: Log
) -> None:
    flow = Flow(stack, api)
    await mixed_load.prepare(flow)
    parts = stack.parts()
    stack.kill("reaper")
    execution_id = await flow.start("mixed_loop")
    await stack.until_done(execution_id, mixed_load.ITEMS // 2)
    os.kill(parts["worker-1"], signal.SIGKILL)
    left = await until_only_its_are_left(stack, "worker-1-%")
    assert left, "it held nothing: this shows nothing"
    # As if half a minute had passed: their leases are over.
    await stack.query(
        "UPDATE noetl.command SET lease_until = now() - interval '10 seconds'"
        " WHERE worker_id LIKE 'worker-1-%' RETURNING 1"
    )

    with another(stack, "reaper"):
        execution = await flow.ended(execution_id, seconds=240)
    await stack.client.aclose()

    assert execution.count("command.expired") == left
    found = mixed_load.keys_of(execution.events)
    assert without_attempts(found) == without_attempts(usual["loop"])


async def test_who_slept_through_its_leadership_does_not_lead_when_it_wakes(
    stack: Stack, api: str, usual: Log
) -> None:
    flow = Flow(stack, api)
    await mixed_load.prepare(flow)
    parts = stack.parts()
    await until_led_by_the_living(stack)
    before = await leaders(stack)
    standby = ExitStack()
    for name in CONTROL:
        standby.enter_context(another(stack, name.replace("-", "_")))

    async def disturb() -> None:
        for name in CONTROL:
            os.kill(parts[name], signal.SIGSTOP)

    async def mend() -> None:
        took = await until(
            lambda: is_led_by_others(stack, before), seconds=120, what="nobody leads"
        )
        print(f"\nothers lead after {took:.1f} s more")

    with standby:
        try:
            run = await mixed_load.run(flow, disturb, mend=mend)
            print(f"leaders asleep: {run}")
        finally:
            for name in CONTROL:
                os.kill(parts[name], signal.SIGCONT)
        await asyncio.sleep(1.0)
        awake = await mixed_load.run(flow)
        print(f"leaders awake, without a role: {awake}")
        now = await leaders(stack)
        assert all(now[role].owner != before[role].owner for role in CONTROL)
        assert all(now[role].epoch == before[role].epoch + 1 for role in CONTROL)
        assert stack.parts() == parts
    await stack.client.aclose()

    assert run.log == awake.log == usual


class Leader(NamedTuple):
    owner: int
    epoch: int


async def leaders(stack: Stack) -> dict[str, Leader]:
    rows = await stack.query(
        "SELECT role, owner_runtime_id, epoch FROM noetl.leader WHERE leased_until > now()"
    )
    return {row["role"]: Leader(row["owner_runtime_id"], row["epoch"]) for row in rows}


async def is_led_by_others(stack: Stack, before: dict[str, Leader]) -> bool:
    now = await leaders(stack)
    return all(role in now and now[role].owner != before[role].owner for role in CONTROL)


async def until_led_by_the_living(stack: Stack) -> None:
    async def is_led() -> bool:
        return set(await leaders(stack)) >= set(CONTROL)

    await until(is_led, seconds=120, what="nobody leads")


async def until_offline(stack: Stack, *names: str) -> None:
    """The sweep has noticed who is gone."""
    sql = "SELECT count(*) FROM noetl.runtime WHERE name LIKE ANY ($1) AND status = 'offline'"

    async def is_noticed() -> bool:
        return int((await stack.query(sql, [f"{n}-%" for n in names]))[0]["count"]) == len(names)

    await until(is_noticed, seconds=180, what="not noticed")


async def is_waiting(stack: Stack) -> bool:
    sql = (
        "SELECT (SELECT count(*) FROM noetl.timer) AS timers,"
        " (SELECT count(*) FROM noetl.execution WHERE status = 'RUNNING') AS running"
    )
    (row,) = await stack.query(sql)
    return bool(row["timers"] >= mixed_load.CHILDREN and row["running"] > mixed_load.CHILDREN)


async def until_only_its_are_left(stack: Stack, worker: str) -> int:
    """All that the living can do is done, and what it said before it died is recorded. How many
    commands that leaves."""
    sql = (
        "SELECT count(*) AS open, count(*) FILTER (WHERE worker_id LIKE $1) AS its"
        " FROM noetl.command"
    )
    seen: list[tuple[int, int]] = []

    async def is_so() -> bool:
        (row,) = await stack.query(sql, worker)
        seen.append((row["open"], row["its"]))
        steady = seen[-40:]  # about two seconds
        return len(steady) == 40 and set(steady) == {seen[-1]} and row["open"] == row["its"]

    await until(is_so, seconds=180, what="the rest is not done")
    return seen[-1][0]


async def assert_epochs_are_recorded(stack: Stack) -> None:
    execution_id = await stack.execute("tests/mixed_timer")
    sql = "SELECT FROM noetl.checkpoint WHERE execution_id = $1"

    async def is_recorded() -> bool:
        return bool(await stack.query(sql, execution_id))

    await until(is_recorded, seconds=60, what="no epoch was recorded")
    assert await stack.until_ended(execution_id) == "execution.completed"
