"""process/leader.py: at most one process leads, by its own clock too."""

from noetl_core.process.config import Config
from noetl_core.process.leader import Leadership, leadership
from noetl_core.process.membership import Member, join_runtime
from noetl_core.process.service import Service, serving
from noetl_core.store.postgres import Pool, open_pool
from noetl_core.store.runtime import Registration
from support.clock import FakeClock

LEASE_SECONDS = 15.0


async def candidate(pool: Pool, name: str) -> tuple[Leadership, FakeClock]:
    member = Member(pool, Registration(name=name, kind="reaper"))
    await member.heartbeat()
    clock = FakeClock()
    held = Leadership(pool, member, "reaper", lease_seconds=LEASE_SECONDS, clock=clock)
    return held, clock


async def test_of_two_candidates_the_first_leads(pool: Pool) -> None:
    (first, _), (second, _) = await candidate(pool, "a"), await candidate(pool, "b")

    await first.keep()
    await second.keep()

    assert (first.is_leader, second.is_leader) == (True, False)


async def test_a_leader_that_slept_through_its_lease_knows_that_it_leads_no_more(
    pool: Pool,
) -> None:
    leader, clock = await candidate(pool, "a")
    await leader.keep()

    clock.advance(LEASE_SECONDS)

    assert not leader.is_leader
    assert leader.has_led, "nobody else is known to lead"


async def test_who_was_succeeded_has_not_led_any_more(pool: Pool) -> None:
    (sleeper, clock), (second, _) = await candidate(pool, "a"), await candidate(pool, "b")
    await sleeper.keep()
    clock.advance(LEASE_SECONDS)
    await pool.execute("UPDATE noetl.leader SET leased_until = now() - interval '1 second'")
    await second.keep()

    await sleeper.keep()

    assert (sleeper.has_led, second.has_led) == (False, True)


async def test_who_was_killed_and_started_again_need_not_wait_for_its_own_lease(
    pool: Pool,
) -> None:
    (killed, _), (other, _) = await candidate(pool, "a"), await candidate(pool, "b")
    await killed.keep()
    (again, _) = await candidate(pool, "a")

    await other.keep()
    await again.keep()

    assert (other.is_leader, again.is_leader) == (False, True)
    assert again.epoch > killed.epoch


async def test_who_resigns_is_followed_at_once(pool: Pool) -> None:
    (first, _), (second, _) = await candidate(pool, "a"), await candidate(pool, "b")
    await first.keep()

    await first.resign()
    await second.keep()

    assert (first.is_leader, second.is_leader) == (False, True)
    assert second.epoch == 2


async def test_a_service_leads_while_it_lives_and_resigns_at_its_end(
    pool: Pool, database: str
) -> None:
    led: list[bool] = []

    async def start(service: Service[Config]) -> None:
        own = await service.open(open_pool(database, role="noetl_reaper", size_max=2))
        member = await service.open(join_runtime(service, own, kind="reaper"))
        held = await service.open(leadership(service, own, member, "reaper"))
        led.append(held.is_leader)

    async with serving(Service("reaper", Config(postgres_dsn=database)), start):
        pass

    assert led == [True]
    assert await pool.fetchval("SELECT owner_runtime_id FROM noetl.leader") is None
