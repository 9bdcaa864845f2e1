"""Where the shard count changed, the projection waits until every shard has come as far."""

import msgspec

from noetl_core.domain.fold import fold
from noetl_core.domain.ids import EventId, ExecutionId, RuntimeId, ShardId
from noetl_core.domain.sharding import shard_of
from noetl_core.domain.state import ExecutionState
from noetl_core.store import execution_shard, resize
from noetl_core.store.execution_projection import forget_everything
from noetl_core.store.postgres import Pool
from noetl_projection.memory import Memory
from noetl_projection.project import project
from services.projection.logs import Logged, append, interleaved
from services.projection.test_project import Held, rows

SHARDS = 64
EXECUTIONS = 40


async def claim_all(pool: Pool) -> dict[ShardId, int]:
    claims = await execution_shard.claim(
        pool, "projection", RuntimeId(1), instance="p", lease_seconds=60, limit=SHARDS
    )
    return dict(claims)


async def write(pool: Pool) -> list[Logged]:
    """A log of which the first half lies on shards by the old count, the rest by the new one."""
    log = interleaved(7, EXECUTIONS)
    half = len(log) // 2
    switch_id = log[half - 1].event.event_id
    moved = [_moved(one) for one in log[half:]]
    await append(pool, log[:half])
    await change_count(pool, SHARDS, switch_id=switch_id)
    await append(pool, moved)
    return [*log[:half], *moved]


async def change_count(pool: Pool, shards: int, *, switch_id: EventId) -> None:
    await resize.request(pool, 1, shards_from=16, shards_to=shards)
    async with pool.acquire() as conn, conn.transaction():
        wish = await resize.open_wish(conn, is_locked=True)
        assert wish is not None
        await execution_shard.lock_all(conn)
        await execution_shard.begin_anew(conn, shard_count=shards)
        await resize.record_switch(conn, wish, switch_id)


def _moved(one: Logged, shards: int = SHARDS) -> Logged:
    home = shard_of(one.event.execution_id, shard_count=shards)
    return Logged(one.event, home, one.created_at)


async def project_some(pool: Pool, held: dict[ShardId, int]) -> None:
    memory = Memory(executions_max=1000)
    while await project(pool, Held(held), memory, batch_size=30):
        pass


def folded(log: list[Logged]) -> dict[ExecutionId, ExecutionState]:
    states: dict[ExecutionId, ExecutionState] = {}
    for one in log:
        state = states.get(one.event.execution_id)
        state = state or ExecutionState(execution_id=one.event.execution_id)
        states[one.event.execution_id] = fold(state, one.event)
    return states


async def test_nothing_past_the_change_is_read_until_every_shard_has_come_there(
    pool: Pool,
) -> None:
    log = await write(pool)
    held = await claim_all(pool)
    upper = {shard: epoch for shard, epoch in held.items() if shard >= 8}
    lower = {shard: epoch for shard, epoch in held.items() if shard < 8}
    boundary = (await resize.current(pool)).switch_id

    await project_some(pool, upper)
    reached = await pool.fetchval("SELECT max(last_projected_event_id) FROM noetl.execution")
    await project_some(pool, lower)
    await project_some(pool, upper)
    await project_some(pool, lower)

    assert reached <= boundary
    found = await pool.fetch("SELECT execution_id, state, shard_id FROM noetl.execution")
    states = {
        r["execution_id"]: msgspec.json.decode(r["state"], type=ExecutionState) for r in found
    }
    assert states == folded(log)
    last = {one.event.execution_id: one.shard_id for one in log}
    assert {row["execution_id"]: row["shard_id"] for row in found} == last


async def test_a_replay_reads_the_shards_that_were_set_aside(pool: Pool) -> None:
    log = interleaved(7, EXECUTIONS)
    half = len(log) // 2
    await append(pool, log[:half])
    await change_count(pool, 8, switch_id=log[half - 1].event.event_id)
    await append(pool, [_moved(one, 8) for one in log[half:]])
    held = await claim_all(pool)
    for _ in range(2):
        await project_some(pool, held)
    before = await rows(pool)
    await pool.execute("UPDATE noetl.resize SET switched_at = now() - interval '2 hours'")
    assert await execution_shard.retire(pool, quiet_seconds=3900) == list(range(8, 16))

    async with pool.acquire() as conn, conn.transaction():
        await forget_everything(conn)
    held = await claim_all(pool)
    for _ in range(2):
        await project_some(pool, held)

    assert await rows(pool) == before
    assert await resize.next_boundary(pool) is None
    assert await execution_shard.retire(pool, quiet_seconds=3900) == list(range(8, 16))


async def test_a_replay_of_a_log_in_which_the_count_changed_gives_the_same_bytes(
    pool: Pool,
) -> None:
    await write(pool)
    await project_some(pool, await claim_all(pool))
    before = await rows(pool)
    async with pool.acquire() as conn, conn.transaction():
        await forget_everything(conn)

    held = await claim_all(pool)
    for shards in (sorted(held)[::-1][:40], sorted(held), sorted(held)):
        await project_some(pool, {shard: held[shard] for shard in shards})

    assert await rows(pool) == before
