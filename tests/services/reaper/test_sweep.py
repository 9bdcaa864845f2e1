"""The turns of the reaper: what it sees, what it says, and by which road."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import pytest

from noetl_core.bus.connection import Bus, open_bus
from noetl_core.domain.ids import CommandId, ExecutionId, ShardId, WorkerId
from noetl_core.domain.sharding import shard_of
from noetl_core.process.service import Service, serving
from noetl_core.store import command
from noetl_core.store.command import CommandKey
from noetl_core.store.postgres import Pool, open_pool
from noetl_core.store.setting import write_setting
from noetl_core.store.timer import DueTimer
from noetl_core.wire.messages import Due, Expired, Message, Reconcile, decode_messages
from noetl_core.wire.subjects import EVENT_STREAM, event_batch
from noetl_reaper import sweep as sweep_module
from noetl_reaper.config import ReaperConfig
from noetl_reaper.main import start
from noetl_reaper.patience import WAITS_MAX, Patience
from noetl_reaper.reported import Reported
from noetl_reaper.sweep import sweep_executions, sweep_leases, sweep_timers

GRACE_SECONDS = 2.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def reaper_pool(database: str) -> AsyncIterator[Pool]:
    async with open_pool(database, role="noetl_reaper", size_max=2) as opened:
        yield opened


@pytest.fixture
async def away() -> AsyncIterator[Bus]:
    """A bus whose NATS is not there."""
    async with open_bus("nats://127.0.0.1:1", name="away") as opened:
        yield opened


def shard(execution_id: int, shard_count: int = 16) -> ShardId:
    return shard_of(ExecutionId(execution_id), shard_count=shard_count)


async def add_command(pool: Pool, execution_id: int, *, lease_ended_seconds: float | None) -> None:
    """A command that is pending (None), or whose lease ended that long ago (negative: will end)."""
    await pool.execute(
        "INSERT INTO noetl.command (execution_id, command_id, shard_id, step, payload)"
        " VALUES ($1, 'load.1#1', $2, 'load', '')",
        execution_id,
        shard(execution_id),
    )
    if lease_ended_seconds is not None:
        await command.lease(pool, WorkerId("w1"), ["cpu"], limit=1, lease_seconds=0)
        await pool.execute(
            "UPDATE noetl.command SET lease_until = now() - make_interval(secs => $2)"
            " WHERE execution_id = $1",
            execution_id,
            lease_ended_seconds,
        )


async def add_execution(
    pool: Pool, execution_id: int, *, idle_seconds: float, status: str = "RUNNING"
) -> None:
    await pool.execute(
        "INSERT INTO noetl.execution (execution_id, catalog_id, path, version, shard_id, status,"
        " state, ctx, progress, last_event_type, last_projected_event_id, started_at, updated_at)"
        " VALUES ($1, 1, 'p', 1, $2, $3, '{}', '{}', '{}', 'step.enter', 1, now(),"
        " now() - make_interval(secs => $4))",
        execution_id,
        shard(execution_id),
        status,
        idle_seconds,
    )


async def add_timer(
    pool: Pool, execution_id: int, name: str = "wait:hold.1#1", *, due_seconds_ago: float
) -> None:
    await pool.execute(
        "INSERT INTO noetl.timer (execution_id, timer, due_at)"
        " VALUES ($1, $2, now() - make_interval(secs => $3))"
        " ON CONFLICT (execution_id, timer) DO UPDATE SET due_at = excluded.due_at",
        execution_id,
        name,
        due_seconds_ago,
    )


async def streamed(bus: Bus) -> list[tuple[str, Message]]:
    """Everything in the event stream: subject and message."""
    assert bus.client is not None
    jetstream = bus.client.jetstream()
    info = await jetstream.stream_info(EVENT_STREAM)
    found = []
    for number in range(1, info.state.messages + 1):
        raw = await jetstream.get_msg(EVENT_STREAM, number)
        found += [(raw.subject or "", one) for one in decode_messages(raw.data or b"")]
    return found


async def in_inbox(pool: Pool) -> list[tuple[int, Message]]:
    rows = await pool.fetch("SELECT shard_id, body FROM noetl.inbox ORDER BY inbox_id")
    return [(row["shard_id"], one) for row in rows for one in decode_messages(row["body"])]


def commands(clock: Clock | None = None) -> Reported[CommandKey]:
    return Reported(repeat_seconds=15, clock=clock or Clock())


def executions(clock: Clock | None = None) -> Reported[ExecutionId]:
    return Reported(repeat_seconds=15, clock=clock or Clock())


def timers(clock: Clock | None = None) -> Reported[DueTimer]:
    return Reported(repeat_seconds=15, clock=clock or Clock())


async def leases(
    pool: Pool,
    bus: Bus,
    reported: Reported[CommandKey],
    limit: int = 100,
    patience: Patience | None = None,
) -> int:
    patience = patience or Patience(wait_seconds=10, late_seconds=3, clock=Clock())
    return await sweep_leases(
        pool, bus, reported, patience, grace_seconds=GRACE_SECONDS, limit=limit
    )


async def idle(pool: Pool, bus: Bus, reported: Reported[ExecutionId], limit: int = 100) -> int:
    return await sweep_executions(pool, bus, reported, idle_seconds=30, limit=limit)


async def test_an_expired_lease_is_reported_to_the_broker_of_its_shard(
    pool: Pool, reaper_pool: Pool, bus: Bus
) -> None:
    await add_command(pool, 101, lease_ended_seconds=10)
    await add_command(pool, 102, lease_ended_seconds=-10)
    await add_command(pool, 103, lease_ended_seconds=GRACE_SECONDS / 2)
    await add_command(pool, 104, lease_ended_seconds=None)

    assert await leases(reaper_pool, bus, commands()) == 1

    ((subject, message),) = await streamed(bus)
    assert subject == event_batch(shard(101))
    assert isinstance(message, Expired)
    assert (message.execution_id, message.command_id) == (101, CommandId("load.1#1"))
    assert "w1" in message.reason


async def test_it_is_reported_once_per_interval(pool: Pool, reaper_pool: Pool, bus: Bus) -> None:
    await add_command(pool, 101, lease_ended_seconds=10)
    clock = Clock()
    reported = commands(clock)

    counts = []
    for clock.now in (0.0, 1.0, 14.9, 15.0, 16.0, 29.9, 30.0):
        counts.append(await leases(reaper_pool, bus, reported))

    assert counts == [1, 0, 0, 1, 0, 0, 1]
    assert len(await streamed(bus)) == 3


async def test_without_nats_the_report_goes_through_the_inbox(
    pool: Pool, reaper_pool: Pool, away: Bus
) -> None:
    await add_command(pool, 101, lease_ended_seconds=10)
    await add_execution(pool, 201, idle_seconds=60)

    assert await leases(reaper_pool, away, commands()) == 1
    ((lease_shard, lease_message),) = await in_inbox(pool)
    await pool.execute("DELETE FROM noetl.inbox")
    assert await idle(reaper_pool, away, executions()) == 1
    ((idle_shard, idle_message),) = await in_inbox(pool)

    assert (lease_shard, lease_message.__class__) == (shard(101), Expired)
    assert (idle_shard, idle_message) == (shard(201), Reconcile(execution_id=ExecutionId(201)))


async def test_one_message_carries_all_reports_of_a_shard(
    pool: Pool, reaper_pool: Pool, bus: Bus
) -> None:
    for execution_id in range(100, 150):
        await add_command(pool, execution_id, lease_ended_seconds=10)

    assert await leases(reaper_pool, bus, commands()) == 50

    found = await streamed(bus)
    assert {one.execution_id for _, one in found if isinstance(one, Expired)} == {*range(100, 150)}
    assert all(
        subject == event_batch(shard(one.execution_id))
        for subject, one in found
        if isinstance(one, Expired)
    )
    assert bus.client is not None
    info = await bus.client.jetstream().stream_info(EVENT_STREAM)
    assert info.state.messages == len({shard(e) for e in range(100, 150)})


async def test_a_turn_reports_no_more_than_its_limit_and_the_oldest_first(
    pool: Pool, reaper_pool: Pool, bus: Bus
) -> None:
    for age in range(5, 15):
        await add_command(pool, 100 + age, lease_ended_seconds=age)

    assert await leases(reaper_pool, bus, commands(), limit=3) == 3

    reported = {one.execution_id for _, one in await streamed(bus) if isinstance(one, Expired)}
    assert reported == {114, 113, 112}


async def test_leases_that_were_reported_in_vain_do_not_hide_the_next_ones(
    pool: Pool, reaper_pool: Pool, bus: Bus
) -> None:
    for execution_id in range(101, 106):
        await add_command(pool, execution_id, lease_ended_seconds=100)
    await add_command(pool, 301, lease_ended_seconds=50)
    reported = commands()

    counts = [await leases(reaper_pool, bus, reported, limit=5) for _ in range(3)]

    assert counts == [5, 1, 0]


@pytest.mark.parametrize("what", ["lease", "execution", "timer"])
async def test_what_was_dealt_with_makes_room_at_once_and_nothing_is_said_over_and_over(
    pool: Pool, reaper_pool: Pool, bus: Bus, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "FOUND_MAX", 5)
    await write_setting(pool, "shard_count", 1)
    for execution_id in range(101, 109):
        await add_overdue(pool, what, execution_id)
    turn = turns_of(what, reaper_pool, bus, Clock())

    counts = [await turn() for _ in range(5)]
    told = [one.execution_id for _, one in await streamed(bus)]  # type: ignore[union-attr]
    await deal_with(pool, told)
    counts += [await turn() for _ in range(2)]

    assert counts == [3, 2, 0, 0, 0, 3, 0]
    assert len(set(told)) == len(told) == 5


@pytest.mark.parametrize("what", ["lease", "execution", "timer"])
async def test_a_shard_with_very_many_that_nobody_acts_on_keeps_no_other_waiting(
    pool: Pool, reaper_pool: Pool, bus: Bus, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "FOUND_MAX", 2 * 16)
    flooded, *others = sorted({shard(e): e for e in range(100, 200)}.items())
    flood = [e for e in range(1000, 2000) if shard(e) == flooded[0]][:40]
    for execution_id in flood:
        await add_overdue(pool, what, execution_id)
    turn = turns_of(what, reaper_pool, bus, Clock())

    counts = [await turn() for _ in range(3)]
    for _, execution_id in others:
        await add_overdue(pool, what, execution_id)
    counts += [await turn() for _ in range(6)]

    assert counts == [2, 0, 0, 3, 3, 3, 3, 3, 0]
    assert {to for to, _ in await streamed(bus)} == {event_batch(ShardId(n)) for n in range(16)}


async def deal_with(pool: Pool, execution_ids: list[int]) -> None:
    for table in ("command", "execution", "timer"):
        await pool.execute(
            f"DELETE FROM noetl.{table} WHERE execution_id = ANY ($1)", execution_ids
        )


async def add_overdue(pool: Pool, what: str, execution_id: int) -> None:
    if what == "lease":
        await add_command(pool, execution_id, lease_ended_seconds=10)
    elif what == "execution":
        await add_execution(pool, execution_id, idle_seconds=60)
    else:
        await add_timer(pool, execution_id, due_seconds_ago=1)


def turns_of(what: str, pool: Pool, bus: Bus, clock: Clock) -> Callable[[], Awaitable[int]]:
    return {
        "lease": partial(leases, pool, bus, commands(clock), limit=3),
        "execution": partial(idle, pool, bus, executions(clock), limit=3),
        "timer": partial(sweep_timers, pool, bus, timers(clock), limit=3),
    }[what]


async def test_after_a_time_without_the_database_workers_may_renew_first(
    pool: Pool, reaper_pool: Pool, bus: Bus
) -> None:
    await add_command(pool, 101, lease_ended_seconds=100)
    await add_command(pool, 102, lease_ended_seconds=100)
    clock = Clock()
    reported, patience = commands(clock), Patience(wait_seconds=10, late_seconds=3, clock=clock)

    clock.now = 70.0
    assert await leases(reaper_pool, bus, reported, patience=patience) == 0
    await command.heartbeat(
        pool, WorkerId("w1"), [(ExecutionId(101), CommandId("load.1#1"))], lease_seconds=60
    )
    for clock.now in (72.0, 74.0, 76.0, 78.0):
        assert await leases(reaper_pool, bus, reported, patience=patience) == 0
    clock.now = 80.0
    assert await leases(reaper_pool, bus, reported, patience=patience) == 1

    assert [one.execution_id for _, one in await streamed(bus) if isinstance(one, Expired)] == [102]


def test_one_that_comes_to_lead_knows_that_the_database_was_away() -> None:
    clock = Clock()
    patience = Patience(wait_seconds=10, late_seconds=3, clock=clock)

    believed = []
    for clock.now in (1.0, 2.0, 60.0, 62.0, 65.0, 68.0, 70.0):
        believed.append(patience.looked(clock.now))

    assert believed == [True, True, False, False, False, False, True]


def test_when_the_clock_of_the_database_is_put_forward_workers_may_renew_first() -> None:
    clock = Clock()
    patience = Patience(wait_seconds=10, late_seconds=3, clock=clock)

    believed = []
    for clock.now in range(1, 18):
        forward = 0 if clock.now < 4 else 60
        believed.append(patience.looked(1e9 + forward + clock.now))

    assert [at for at, is_believed in enumerate(believed, 1) if is_believed] == [
        *range(1, 4),
        *range(14, 18),
    ]


def test_when_the_clock_of_the_database_is_put_back_nothing_waits_for_it() -> None:
    clock = Clock()
    patience = Patience(wait_seconds=10, late_seconds=3, clock=clock)

    believed = []
    for clock.now in range(1, 9):
        back = 0 if clock.now < 4 else 60
        believed.append(patience.looked(1e9 - back + clock.now))

    assert all(believed)


def test_where_every_look_is_late_leases_are_ended_all_the_same() -> None:
    clock = Clock()
    patience = Patience(wait_seconds=10, late_seconds=3, clock=clock)

    waited = 0
    for clock.now in range(5, 1000, 5):
        if patience.looked(clock.now):
            break
        waited += 1

    assert WAITS_MAX <= waited <= WAITS_MAX + 2


async def test_an_execution_with_nothing_under_way_is_reported(
    pool: Pool, reaper_pool: Pool, bus: Bus
) -> None:
    await add_execution(pool, 201, idle_seconds=60)

    assert await idle(reaper_pool, bus, executions()) == 1

    assert await streamed(bus) == [
        (event_batch(shard(201)), Reconcile(execution_id=ExecutionId(201)))
    ]


async def test_an_execution_that_moves_waits_or_has_ended_is_left_alone(
    pool: Pool, reaper_pool: Pool, bus: Bus
) -> None:
    await add_execution(pool, 201, idle_seconds=5)
    await add_execution(pool, 202, idle_seconds=60)
    await add_command(pool, 202, lease_ended_seconds=None)
    await add_execution(pool, 203, idle_seconds=60)
    await pool.execute("INSERT INTO noetl.inbox (shard_id, body) VALUES ($1, '')", shard(203))
    for number, status in enumerate(("COMPLETED", "FAILED", "CANCELLED", "PAUSED")):
        await add_execution(pool, 204 + number, idle_seconds=60, status=status)
    assert shard(203) not in {shard(201), shard(202)}

    assert await idle(reaper_pool, bus, executions()) == 0


async def test_an_execution_that_waits_is_not_idle_and_one_with_a_timeout_may_be(
    pool: Pool, reaper_pool: Pool, bus: Bus
) -> None:
    for execution_id, name in ((201, "wait:hold.1#1"), (202, "step:hold.1"), (203, "execution")):
        await add_execution(pool, execution_id, idle_seconds=60)
        await add_timer(pool, execution_id, name, due_seconds_ago=-3600)

    assert await idle(reaper_pool, bus, executions()) == 2

    told = {one.execution_id for _, one in await streamed(bus) if isinstance(one, Reconcile)}
    assert told == {202, 203}


async def test_a_timer_that_ran_out_is_reported_to_the_broker_of_its_shard(
    pool: Pool, reaper_pool: Pool, bus: Bus
) -> None:
    await add_timer(pool, 101, due_seconds_ago=1)
    await add_timer(pool, 102, due_seconds_ago=-60)

    assert await sweep_timers(reaper_pool, bus, timers(), limit=100) == 1

    assert await streamed(bus) == [
        (event_batch(shard(101)), Due(execution_id=ExecutionId(101), timer="wait:hold.1#1"))
    ]
    assert await pool.fetchval("SELECT count(*) FROM noetl.timer") == 2


async def test_a_timer_is_reported_again_only_after_a_while_or_when_it_was_set_again(
    pool: Pool, reaper_pool: Pool, away: Bus
) -> None:
    await add_timer(pool, 101, due_seconds_ago=9)
    clock = Clock()
    reported = timers(clock)

    counts = []
    for clock.now in (0.0, 1.0, 14.9, 15.0, 16.0):
        counts.append(await sweep_timers(reaper_pool, away, reported, limit=100))
    await add_timer(pool, 101, due_seconds_ago=1)
    counts.append(await sweep_timers(reaper_pool, away, reported, limit=100))

    assert counts == [1, 0, 0, 1, 0, 1]
    assert {one.__class__ for _, one in await in_inbox(pool)} == {Due}


async def test_timers_that_nobody_acts_on_do_not_keep_the_later_ones_waiting(
    pool: Pool, reaper_pool: Pool, bus: Bus
) -> None:
    await write_setting(pool, "shard_count", 1)
    for number in range(25):
        await add_timer(pool, 300 + number, due_seconds_ago=100 - number)
    reported = timers()

    counts = [await sweep_timers(reaper_pool, bus, reported, limit=10) for _ in range(4)]

    assert counts == [10, 10, 5, 0]
    told = [one.execution_id for _, one in await streamed(bus) if isinstance(one, Due)]
    assert set(told[:10]) == {*range(300, 310)}


async def test_many_idle_executions_all_get_their_turn(
    pool: Pool, reaper_pool: Pool, bus: Bus
) -> None:
    """Those just reported do not use up the limit of the next turns."""
    for execution_id in range(300, 325):
        await add_execution(pool, execution_id, idle_seconds=60)
    clock = Clock()
    reported = executions(clock)

    counts = [await idle(reaper_pool, bus, reported, limit=10) for _ in range(4)]
    clock.now = 15.0
    later = await idle(reaper_pool, bus, reported, limit=10)

    assert counts == [10, 10, 5, 0]
    assert later == 10


async def test_a_report_goes_by_the_shard_count_of_now(
    pool: Pool, reaper_pool: Pool, away: Bus
) -> None:
    moved = next(e for e in range(100, 200) if shard(e) != shard(e, 64))
    await add_command(pool, moved, lease_ended_seconds=10)
    await write_setting(pool, "shard_count", 64)

    await leases(reaper_pool, away, commands())

    assert [to for to, _ in await in_inbox(pool)] == [shard(moved, 64)]


async def test_the_service_sweeps_and_leaves_the_log_alone(
    pool: Pool, database: str, nats_url: str, bus: Bus
) -> None:
    await add_command(pool, 101, lease_ended_seconds=10)
    await add_execution(pool, 201, idle_seconds=60)
    await add_timer(pool, 301, due_seconds_ago=1)
    config = ReaperConfig(postgres_dsn=database, nats_url=nats_url)
    async with serving(Service("reaper", config), start):
        pass  # each loop has its first turn

    kinds = {one.__class__ for _, one in await streamed(bus)}
    assert kinds == {Expired, Reconcile, Due}
    assert await pool.fetchval("SELECT count(*) FROM noetl.event") == 0
    assert await pool.fetchval("SELECT count(*) FROM noetl.command") == 1


async def test_a_timer_is_reported_when_it_runs_out_and_not_at_the_next_look(
    pool: Pool, database: str
) -> None:
    config = ReaperConfig(
        postgres_dsn=database, nats_url="nats://127.0.0.1:1", reaper_timer_poll_seconds=60.0
    )
    await add_timer(pool, 301, due_seconds_ago=-0.5)

    async with serving(Service("reaper", config), start), asyncio.timeout(30):
        while not await in_inbox(pool):  # noqa: ASYNC110 - the service is not ours to wake
            await asyncio.sleep(0.05)

    assert await pool.fetchval("SELECT now() - due_at < interval '30 seconds' FROM noetl.timer")
