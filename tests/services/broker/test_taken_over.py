"""A shard that changes hands keeps its epoch, and what its last owner moved gets the next one."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from noetl_broker import advance, left
from noetl_broker.config import BrokerConfig
from noetl_broker.left import look_back
from noetl_broker.main import start
from noetl_broker.turn import Letter
from noetl_core.domain.ids import EpochId, EventId, ExecutionId, RuntimeId, ShardId
from noetl_core.domain.sharding import shard_of
from noetl_core.process.service import Service, serving
from noetl_core.store import checkpoint, resize
from noetl_core.store.postgres import Pool, open_pool
from noetl_core.wire.messages import Barrier, encode_messages
from services.broker.desk import Desk, claimed
from services.broker.test_advance import CHAIN
from services.broker.test_misdirected import moving_execution, resized

CLOSE = "checkpoint.committed"


@pytest.fixture
async def former(pool: Pool) -> Desk:
    desk = Desk(pool)
    await desk.claim()
    return desk


@pytest.fixture
async def broker_pool(database: str) -> AsyncIterator[Pool]:
    async with open_pool(database, role="noetl_broker", size_max=2) as opened:
        yield opened


async def succeed(desk: Desk, pool: Pool) -> None:
    """It has claimed its shards and takes them over, as the service does."""
    generation = await resize.current(pool)
    found = await look_back(pool, list(desk.claims), generation)
    desk.broker.take_over(found, shard_count=generation.shard_count)


async def successor(former: Desk, pool: Pool) -> Desk:
    await former.pool.execute("UPDATE noetl.execution_shard SET leased_until = NULL")
    desk = Desk(former.pool, RuntimeId(2))
    await desk.claim()
    await succeed(desk, pool)
    return desk


async def close(desk: Desk, epoch: EpochId | None = None) -> EpochId:
    epoch = epoch or EpochId(desk.mint())
    letters = [Letter(s, encode_messages([Barrier(shard_id=s, epoch=epoch)])) for s in desk.claims]
    await desk.broker.advance(letters)
    return epoch


async def record(pool: Pool) -> None:
    """The projection and the checkpointer come to the end of the log."""
    await pool.execute(
        "INSERT INTO noetl.projection_checkpoint (shard_id, last_projected_event_id)"
        " SELECT shard_id, max(event_id) FROM noetl.event GROUP BY shard_id"
        " ON CONFLICT (shard_id) DO UPDATE SET last_projected_event_id ="
        " excluded.last_projected_event_id"
    )
    shards = {ShardId(number): EventId(0) for number in range(64)}
    await checkpoint.record(pool, shards, limit=1000)


async def test_what_a_broker_recorded_before_it_was_killed_gets_the_next_epoch(
    former: Desk, broker_pool: Pool
) -> None:
    execution_id = await former.start(CHAIN)
    await close(former)
    await record(former.pool)
    (leased,) = await former.lease()
    await former.send(claimed(execution_id, leased.command_id))
    assert (await former.types(execution_id))[-1] == "command.claimed"

    desk = await successor(former, broker_pool)
    await close(desk)

    assert (await desk.types(execution_id))[-1] == CLOSE


async def test_nothing_is_marked_that_has_its_epoch_or_has_ended(
    former: Desk, broker_pool: Pool
) -> None:
    await former.start(CHAIN)
    await close(former)
    await record(former.pool)
    ended = await former.start(CHAIN)
    await former.run({"first": {"go": False}})
    marks = "SELECT count(*) FROM noetl.event WHERE event_type = $1"
    assert await former.pool.fetchval(marks, CLOSE) == 1

    desk = await successor(former, broker_pool)
    await close(desk)

    assert (await desk.types(ended))[-1] == "execution.completed"
    assert await desk.pool.fetchval(marks, CLOSE) == 1


async def test_a_shard_that_was_lost_and_came_back_still_knows_what_has_no_epoch(
    former: Desk, broker_pool: Pool
) -> None:
    execution_id = await former.start(CHAIN)
    former.broker.forget_shards(former.claims)
    await succeed(former, broker_pool)

    await close(former)

    assert (await former.types(execution_id))[-1] == CLOSE


async def test_one_whose_playbook_is_not_understood_any_more_is_not_marked_and_the_others_are(
    former: Desk, broker_pool: Pool
) -> None:
    bad, good = await former.start(CHAIN), await former.start(CHAIN)
    await former.pool.execute(
        "UPDATE noetl.catalog AS c SET content = 'kind: Scroll' FROM noetl.event AS e"
        " WHERE e.catalog_id = c.catalog_id AND e.execution_id = $1",
        bad,
    )

    desk = await successor(former, broker_pool)
    await close(desk)

    assert (await desk.types(bad))[-1] == "command.issued"
    assert (await desk.types(good))[-1] == CLOSE
    assert not any(desk.broker._unmarked.values()), "it is not tried once a second"


async def test_after_long_without_a_barrier_each_marks_what_it_can_until_all_are_marked(
    former: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advance, "MARKED_MAX", 2)
    moved: dict[ShardId, list[ExecutionId]] = {}
    while max(map(len, moved.values()), default=0) < 5:
        one = await former.start(CHAIN)
        moved.setdefault(shard_of(one, shard_count=16), []).append(one)
    marked: list[int] = []

    for _ in range(3):
        await close(former)
        most = max(moved.values(), key=len)
        marked.append(sum([(await former.types(one))[-1] == CLOSE for one in most]))

    assert marked == [2, 4, 5]
    assert not any(former.broker._unmarked.values())


async def test_a_shard_that_was_lost_before_its_first_turn_marks_nothing(
    former: Desk, broker_pool: Pool
) -> None:
    await former.start(CHAIN)
    desk = await successor(former, broker_pool)

    desk.broker.forget_shards(desk.claims)
    desk.broker._forget()

    assert not any(desk.broker._unmarked.values())


async def test_what_moved_to_another_shard_gets_its_epoch_there(
    former: Desk, pool: Pool, broker_pool: Pool
) -> None:
    execution_id = await moving_execution(former)
    assert await former.types(execution_id)
    await resized(former, pool)
    await succeed(former, broker_pool)

    await close(former)

    sql = "SELECT shard_id FROM noetl.event WHERE execution_id = $1 AND event_type = $2"
    own = shard_of(execution_id, shard_count=64)
    assert await pool.fetchval(sql, execution_id, CLOSE) == own
    await record(pool)
    await succeed(former, broker_pool)
    former.broker._forget()
    assert not any(former.broker._unmarked.values()), "it has its epoch"


async def test_only_the_last_events_of_a_shard_are_looked_at(
    former: Desk, broker_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(left, "EVENTS_MAX", 1)
    seen: set[ShardId] = set()
    while True:
        newest = await former.start(CHAIN)
        shard = shard_of(newest, shard_count=16)
        if shard in seen:
            break
        seen.add(shard)

    found = await look_back(broker_pool, list(former.claims), await resize.current(broker_pool))

    assert found[shard].unmarked == {newest}


async def epochs(desk: Desk, execution_id: ExecutionId) -> list[int | None]:
    rows = await desk.pool.fetch(
        "SELECT epoch_id FROM noetl.event WHERE execution_id = $1 ORDER BY event_id", execution_id
    )
    return [row[0] for row in rows]


async def test_every_event_says_its_epoch_also_before_the_first_barrier(former: Desk) -> None:
    execution_id = await former.start(CHAIN)

    (begun,) = set(await epochs(former, execution_id))

    assert begun is not None
    closed = await close(former)
    await former.run({"first": {"go": False}})
    found = await epochs(former, execution_id)
    assert set(found) == {begun, closed}
    assert found == sorted(found, key=lambda one: one or 0)


async def test_the_next_owner_goes_on_in_the_epoch_of_the_last_one(
    former: Desk, broker_pool: Pool
) -> None:
    execution_id = await former.start(CHAIN)
    closed = await close(former)

    desk = await successor(former, broker_pool)
    await desk.run({"first": {"go": False}})

    assert (await epochs(desk, execution_id))[-1] == closed


async def test_an_old_barrier_closes_nothing_after_a_newer_one_of_the_last_owner(
    former: Desk, broker_pool: Pool
) -> None:
    old = EpochId(former.mint())
    execution_id = await former.start(CHAIN)
    await close(former)
    (leased,) = await former.lease()
    await former.send(claimed(execution_id, leased.command_id))
    desk = await successor(former, broker_pool)

    shard = shard_of(execution_id, shard_count=16)
    await desk.broker.advance(
        [Letter(shard, encode_messages([Barrier(shard_id=shard, epoch=old)]))]
    )

    assert (await desk.types(execution_id)).count(CLOSE) == 1


async def test_epochs_ascend_where_a_close_is_the_first_event_with_one(
    former: Desk, broker_pool: Pool
) -> None:
    """The log was written by a broker that gave none, and the barrier was sent before we came."""
    sent = EpochId(former.mint())
    execution_id = await former.start(CHAIN)
    await former.pool.execute("UPDATE noetl.event SET epoch_id = NULL")
    desk = await successor(former, broker_pool)

    await close(desk, sent)
    await desk.run({"first": {"go": False}})

    given = [epoch for epoch in await epochs(desk, execution_id) if epoch is not None]
    assert len(given) > 1
    assert given == sorted(given)


async def test_a_broker_closes_the_epoch_of_what_waits_since_before_it_came(
    former: Desk, database: str
) -> None:
    execution_id = await former.start(CHAIN)
    await former.pool.execute("UPDATE noetl.execution_shard SET leased_until = NULL")
    config = BrokerConfig(
        postgres_dsn=database, nats_url="nats://127.0.0.1:1", checkpoint_interval_ms=100
    )

    async with serving(Service("broker", config), start), asyncio.timeout(60):
        while CLOSE not in await former.types(execution_id):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
