"""process/ownership.py: shards are shared fairly, taken over quickly, and never used too long."""

import asyncio
from collections.abc import Sequence

import pytest

from noetl_core.domain.ids import RuntimeId, ShardId
from noetl_core.process.membership import Member
from noetl_core.process.ownership import OUTAGE_SECONDS_MAX, SURPLUS_SECONDS, ShardOwner
from noetl_core.store import execution_shard, postgres
from noetl_core.store.execution_shard import Claim
from noetl_core.store.postgres import Pool, open_pool
from noetl_core.store.runtime import Registration
from noetl_core.store.setting import write_setting
from support.clock import FakeClock

SHARD_COUNT = 16
LEASE_SECONDS = 30.0


class Broker:
    """A member with its owner, a clock of its own, and what it was told."""

    def __init__(self, pool: Pool, name: str) -> None:
        self.clock = FakeClock()
        self.member = Member(pool, Registration(name=name, kind="broker"))
        self.gained: list[Claim] = []
        self.lost: list[ShardId] = []
        self.failures: list[Exception] = []
        self.calls = 0
        self.owner = ShardOwner(
            pool,
            self.member,
            role="broker",
            lease_seconds=LEASE_SECONDS,
            on_gain=self._on_gain,
            on_loss=self._on_loss,
            on_release=self._on_release,
            clock=self.clock,
        )

    async def _on_gain(self, claims: Sequence[Claim]) -> None:
        if self.failures:
            raise self.failures.pop()
        self.gained += claims

    async def _on_loss(self, shard_id: ShardId) -> None:
        self.lost.append(shard_id)

    async def _on_release(self) -> None:
        self.calls += 1


async def joined(pool: Pool, name: str) -> Broker:
    broker = Broker(pool, name)
    await broker.member.heartbeat()
    return broker


async def lapse(pool: Pool, broker: Broker) -> None:
    await pool.execute(
        "UPDATE noetl.execution_shard SET leased_until = now() - interval '1 second'"
        " WHERE owner_runtime_id = $1",
        broker.member.runtime_id,
    )


async def test_the_only_broker_takes_every_shard(pool: Pool) -> None:
    broker = await joined(pool, "a")

    await broker.owner.keep()

    assert sorted(broker.owner.held()) == list(range(SHARD_COUNT))
    assert [c.shard_id for c in broker.gained] == list(range(SHARD_COUNT))


async def test_a_second_broker_gets_its_fair_share_even_without_a_shard_manager(
    pool: Pool,
) -> None:
    first = await joined(pool, "a")
    await first.owner.keep()
    second = await joined(pool, "b")
    await first.owner.keep()
    assert len(first.owner.held()) == SHARD_COUNT, "the shard-manager is not given its time"

    first.clock.advance(SURPLUS_SECONDS)
    for broker in (second, first, second):
        await broker.owner.keep()

    assert len(first.owner.held()) == len(second.owner.held()) == SHARD_COUNT / 2
    assert sorted(first.lost) == sorted(second.owner.held())


async def test_three_brokers_hold_all_shards_and_none_more_than_a_third_rounded_up(
    pool: Pool,
) -> None:
    brokers = [await joined(pool, name) for name in "abc"]

    for broker in brokers:
        await broker.owner.keep()

    assert sorted(len(b.owner.held()) for b in brokers) == [4, 6, 6]


async def test_the_shards_of_a_dead_broker_are_claimed_when_its_lease_runs_out(pool: Pool) -> None:
    """Though its last heartbeat still counts: orphans must not wait for a dead process."""
    dead, survivor = await joined(pool, "a"), await joined(pool, "b")
    for broker in (dead, survivor):
        await broker.owner.keep()
    before = dict(dead.owner.held())
    await lapse(pool, dead)

    await survivor.owner.keep()
    await survivor.owner.keep()

    held = survivor.owner.held()
    assert len(held) == SHARD_COUNT
    assert all(held[shard] == epoch + 1 for shard, epoch in before.items())


async def test_who_slept_through_its_lease_holds_nothing_until_it_is_renewed(pool: Pool) -> None:
    broker = await joined(pool, "a")
    await broker.owner.keep()

    broker.clock.advance(LEASE_SECONDS)
    asleep = dict(broker.owner.held())
    await broker.owner.keep()

    assert asleep == {}
    assert len(broker.owner.held()) == SHARD_COUNT
    assert broker.lost == []


async def test_who_wakes_up_after_a_takeover_loses_what_was_taken(pool: Pool) -> None:
    sleeper, survivor = await joined(pool, "a"), await joined(pool, "b")
    for broker in (sleeper, survivor):
        await broker.owner.keep()
    slept_on = sorted(sleeper.owner.held())
    await lapse(pool, sleeper)
    await survivor.owner.keep()

    sleeper.clock.advance(LEASE_SECONDS)
    await sleeper.owner.keep()

    assert sorted(sleeper.lost) == slept_on
    assert not set(sleeper.owner.held()) & set(survivor.owner.held())


async def test_after_an_outage_of_postgres_the_first_to_return_leaves_the_others_theirs(
    pool: Pool,
) -> None:
    """Nobody could renew while it was away: whose lease ran out need not be dead."""
    first, second = await joined(pool, "a"), await joined(pool, "b")
    for broker in (first, second):
        await broker.owner.keep()
    before = {broker: dict(broker.owner.held()) for broker in (first, second)}
    for broker in (first, second):
        await lapse(pool, broker)
        broker.clock.advance(LEASE_SECONDS + 1)

    await first.owner.keep()
    await first.owner.keep()
    await second.owner.keep()

    assert {broker: dict(broker.owner.held()) for broker in (first, second)} == before
    assert first.lost == second.lost == []


async def test_after_an_outage_of_postgres_the_shards_of_the_dead_are_claimed_all_the_same(
    pool: Pool,
) -> None:
    first, dead = await joined(pool, "a"), await joined(pool, "b")
    for broker in (first, dead):
        await broker.owner.keep()
        await lapse(pool, broker)
    first.clock.advance(LEASE_SECONDS + 1)
    await first.owner.keep()

    first.clock.advance(OUTAGE_SECONDS_MAX)
    await first.owner.keep()

    assert len(first.owner.held()) == SHARD_COUNT


async def test_a_shard_whose_gain_failed_is_gained_in_the_next_turn(pool: Pool) -> None:
    broker = await joined(pool, "a")
    broker.failures = [ConnectionResetError()]
    with pytest.raises(ConnectionResetError):
        await broker.owner.keep()

    await broker.owner.keep()

    assert sorted(c.shard_id for c in broker.gained) == list(range(SHARD_COUNT))
    assert len(broker.owner.held()) == SHARD_COUNT


async def test_a_shard_that_a_commit_proved_lost_is_not_used_again_under_its_old_epoch(
    pool: Pool,
) -> None:
    broker = await joined(pool, "a")
    await broker.owner.keep()
    await pool.execute(
        "UPDATE noetl.execution_shard SET epoch = epoch + 1, owner_runtime_id = 7,"
        " leased_until = now() + interval '1 minute' WHERE role = 'broker' AND shard_id = 3"
    )

    await broker.owner.lost([ShardId(3)])
    await broker.owner.keep()

    assert broker.lost == [3]
    assert ShardId(3) not in broker.owner.held()


async def test_a_process_restarted_under_its_name_does_not_wait_for_its_old_lease(
    pool: Pool,
) -> None:
    crashed = await joined(pool, "broker-0")
    await crashed.owner.keep()
    successor = await joined(pool, "broker-0")

    await successor.owner.keep()

    before, after = crashed.owner.held(), successor.owner.held()
    assert after == {shard: epoch + 1 for shard, epoch in before.items()}


async def test_two_turns_at_once_gain_every_shard_once(pool: Pool) -> None:
    broker = await joined(pool, "a")

    await asyncio.gather(broker.owner.keep(), broker.owner.keep())

    assert [c.shard_id for c in broker.gained] == list(range(SHARD_COUNT))


async def test_releasing_lets_the_next_one_claim_at_once(pool: Pool) -> None:
    first = await joined(pool, "a")
    await first.owner.keep()
    await first.owner.release()
    await first.member.leave()
    second = await joined(pool, "b")

    await second.owner.keep()

    assert first.owner.held() == {}
    assert len(second.owner.held()) == SHARD_COUNT


async def test_releasing_frees_what_is_ours_in_postgres_and_not_in_use(pool: Pool) -> None:
    first = await joined(pool, "a")
    first.failures = [ConnectionResetError()]
    with pytest.raises(ConnectionResetError):
        await first.owner.keep()
    other_role = "UPDATE noetl.execution_shard SET owner_runtime_id = $1 WHERE role = 'projection'"
    await pool.execute(other_role, first.member.runtime_id)

    await first.owner.release()

    owned = "SELECT role FROM noetl.execution_shard WHERE owner_runtime_id IS NOT NULL"
    assert {row["role"] for row in await pool.fetch(owned)} == {"projection"}
    second = await joined(pool, "b")
    await second.owner.keep()
    assert len(second.owner.held()) == SHARD_COUNT


async def test_a_shard_that_is_wanted_goes_to_whom_it_is_meant_for_and_to_nobody_else(
    pool: Pool,
) -> None:
    first = await joined(pool, "a")
    await first.owner.keep()
    fast, meant = await joined(pool, "b"), await joined(pool, "c")
    await execution_shard.want(
        pool, "broker", dict.fromkeys([ShardId(3), ShardId(9)], meant.member.runtime_id)
    )

    for broker in (first, fast, meant):
        await broker.owner.keep()

    assert sorted(first.lost) == [3, 9]
    assert sorted(meant.owner.held()) == [3, 9]
    assert dict(fast.owner.held()) == {}


async def test_a_shard_that_its_new_owner_never_claims_is_free_for_all_after_a_moment(
    pool: Pool,
) -> None:
    first = await joined(pool, "a")
    await first.owner.keep()
    second = await joined(pool, "b")
    await execution_shard.want(pool, "broker", {ShardId(3): RuntimeId(77)})
    await first.owner.keep()
    await second.owner.keep()
    at_once = dict(second.owner.held())

    await pool.execute(
        "UPDATE noetl.execution_shard SET updated_at = now() - interval '3 s' WHERE shard_id = 3"
    )
    await second.owner.keep()

    assert at_once == {}
    assert list(second.owner.held()) == [3]


async def test_who_vanishes_in_a_transaction_does_not_keep_its_shards_from_being_claimed(
    pool: Pool, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that is gone, or a process that was stopped: its session says nothing any more."""
    monkeypatch.setattr(postgres, "TRANSACTION_IDLE_SECONDS", 3)
    vanished, survivor = await joined(pool, "a"), await joined(pool, "b")
    await vanished.owner.keep()
    await lapse(pool, vanished)
    async with open_pool(database, role="noetl_broker", size_max=1) as own, own.acquire() as conn:
        await conn.execute("BEGIN")
        await conn.execute("SELECT FROM noetl.execution_shard WHERE role = 'broker' FOR SHARE")
        await survivor.owner.keep()
        assert not survivor.owner.held()

        async with asyncio.timeout(60):
            while len(survivor.owner.held()) < SHARD_COUNT:
                await asyncio.sleep(0.1)
                await survivor.owner.keep()


async def test_who_gives_up_a_shard_calls_whoever_waits_for_it(pool: Pool) -> None:
    broker = await joined(pool, "a")
    await broker.owner.keep()

    await broker.owner.give_up([ShardId(3)])

    assert broker.calls == 1


async def test_who_has_lost_everything_notices_at_its_next_look_not_at_its_next_renewal(
    pool: Pool,
) -> None:
    broker = await joined(pool, "a")
    await broker.owner.keep()
    async with pool.acquire() as conn, conn.transaction():
        await execution_shard.lock_all(conn)
        await execution_shard.begin_anew(conn, shard_count=24)

    await broker.owner.keep()

    assert sorted(broker.lost) == list(range(SHARD_COUNT))
    assert sorted(broker.owner.held()) == list(range(24))


async def test_who_leaves_is_not_counted_any_more_when_its_shards_are_free(pool: Pool) -> None:
    first, second = await joined(pool, "a"), await joined(pool, "b")
    for broker in (first, second):
        await broker.owner.keep()

    await first.owner.release()
    await second.owner.keep()

    assert len(second.owner.held()) == SHARD_COUNT


async def test_shards_that_work_and_shards_that_leave_are_shared_each_by_themselves(
    pool: Pool,
) -> None:
    """Whoever looks first would have all of the work, and only what is leaving the others."""
    await write_setting(pool, "shard_count", 4)
    brokers = [await joined(pool, name) for name in "ab"]

    for broker in brokers:
        await broker.owner.keep()

    assert [len(one.owner.held()) for one in brokers] == [8, 8]
    assert [sum(shard < 4 for shard in one.owner.held()) for one in brokers] == [2, 2]
