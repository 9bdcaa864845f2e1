"""Messages that were sent by an older shard count, and shards that change hands during a turn."""

import pytest

from noetl_broker.advance import Broker
from noetl_broker.turn import Letter
from noetl_core.blob.result_store import ResultStore
from noetl_core.domain.ids import EventId, ExecutionId, ShardId
from noetl_core.domain.sharding import shard_of
from noetl_core.store import execution_shard, inbox, resize
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Message, Start, encode_messages
from services.broker.desk import OWNER, Desk, done

ONE = """apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: p}
workflow:
  - step: only
    tool: {kind: noop}
"""
SHARDS = 64


@pytest.fixture
async def desk(pool: Pool) -> Desk:
    desk = Desk(pool)
    await desk.claim()
    return desk


async def resized(desk: Desk, pool: Pool) -> None:
    """16 -> 64 shards, all of them claimed by the desk."""
    await resize.request(pool, 1, shards_from=16, shards_to=SHARDS)
    switch_id = EventId(desk.mint())
    async with pool.acquire() as conn, conn.transaction():
        wish = await resize.open_wish(conn, is_locked=True)
        assert wish is not None
        await execution_shard.lock_all(conn)
        await execution_shard.begin_anew(conn, shard_count=SHARDS)
        await resize.record_switch(conn, wish, switch_id)
    claims = await execution_shard.claim(
        pool, "broker", OWNER, instance="desk", lease_seconds=60, limit=SHARDS
    )
    desk.claims = dict(claims)
    desk.broker.forget_shards(desk.claims, shard_count=SHARDS)


async def moving_execution(desk: Desk) -> ExecutionId:
    """One that lies on another shard by the new count."""
    while True:
        execution_id = await desk.start(ONE)
        if shard_of(execution_id, shard_count=SHARDS) >= 16:
            return execution_id


async def test_a_message_sent_by_the_old_count_is_taken_to_its_shard_if_that_is_ours(
    desk: Desk, pool: Pool
) -> None:
    execution_id = await moving_execution(desk)
    (leased,) = [one for one in await desk.lease() if one.execution_id == execution_id]
    await resized(desk, pool)

    await desk.send(done(execution_id, leased.command_id, 1))

    rows = await pool.fetch(
        "SELECT DISTINCT shard_id FROM noetl.event WHERE execution_id = $1", execution_id
    )
    home = shard_of(execution_id, shard_count=SHARDS)
    assert (await desk.types(execution_id))[-1] == "execution.completed"
    assert {row["shard_id"] for row in rows} == {home % 16, home}


async def test_a_message_for_the_shard_of_another_goes_into_its_inbox_and_nothing_is_written(
    desk: Desk, pool: Pool
) -> None:
    execution_id = await moving_execution(desk)
    (leased,) = [one for one in await desk.lease() if one.execution_id == execution_id]
    await resized(desk, pool)
    home = shard_of(execution_id, shard_count=SHARDS)
    del desk.claims[home]
    before = await desk.types(execution_id)

    turn = await desk.send(done(execution_id, leased.command_id, 1))

    assert await desk.types(execution_id) == before
    assert turn.told == {home}
    (row,) = await inbox.waiting(pool, [home], limit=10)
    assert row.shard_id == home


async def test_a_letter_in_the_inbox_of_before_leaves_it_in_the_commit_that_passes_it_on(
    desk: Desk, pool: Pool
) -> None:
    execution_id = ExecutionId(next(n for n in range(1, 999) if _moves(ExecutionId(n))))
    start = Start(
        execution_id=execution_id, catalog_id=await desk.register(ONE), path="p", version=1
    )
    await inbox.promise(pool, execution_id, encode_messages([start]))
    await resized(desk, pool)
    old, home = shard_of(execution_id, shard_count=16), shard_of(execution_id, shard_count=SHARDS)
    del desk.claims[home]

    (row,) = await inbox.waiting(pool, [old], limit=10)
    await desk.broker.advance([Letter(row.shard_id, row.body, row.inbox_id)])

    (moved,) = await pool.fetch("SELECT shard_id, execution_id, body FROM noetl.inbox")
    assert (moved["shard_id"], moved["execution_id"]) == (home, execution_id)
    assert moved["body"] == row.body


async def test_a_shard_that_is_lost_during_a_turn_is_forgotten_only_after_it(
    desk: Desk, pool: Pool
) -> None:
    """Its letters would be dropped as those of an execution that was never started."""
    first, second = await two_of_one_shard(desk)
    commands = {one.execution_id: one.command_id for one in await desk.lease()}
    shard = shard_of(first, shard_count=16)

    def losing_mint() -> int:
        broker.forget_shards([shard])
        return desk.mint()

    broker = Broker(pool, ResultStore(), desk.states, held=lambda: desk.claims, mint=losing_mint)
    messages: list[Message] = [done(one, commands[one], 1) for one in (first, second)]
    await broker.advance([Letter(shard, encode_messages(messages))])

    for execution_id in (first, second):
        assert (await desk.types(execution_id))[-1] == "execution.completed"


async def two_of_one_shard(desk: Desk) -> tuple[ExecutionId, ExecutionId]:
    by_shard: dict[ShardId, ExecutionId] = {}
    while True:
        execution_id = await desk.start(ONE)
        shard = shard_of(execution_id, shard_count=16)
        if shard in by_shard:
            return by_shard[shard], execution_id
        by_shard[shard] = execution_id


async def test_a_shard_that_comes_back_is_read_anew(desk: Desk, pool: Pool) -> None:
    """Another one may have written to it meanwhile."""
    execution_id = await desk.start(ONE)
    (leased,) = await desk.lease()
    other = Desk(pool)
    await pool.execute("UPDATE noetl.execution_shard SET leased_until = NULL")
    await other.claim()
    await other.send(done(execution_id, leased.command_id, 1))
    await pool.execute("UPDATE noetl.execution_shard SET leased_until = NULL")
    await desk.claim()

    desk.broker.forget_shards(desk.claims)
    await desk.send(done(execution_id, leased.command_id, 1))

    assert desk.states.get(execution_id).state.is_terminal


def _moves(execution_id: ExecutionId) -> bool:
    return shard_of(execution_id, shard_count=SHARDS) >= 16
