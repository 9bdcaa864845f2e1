"""The turn of the projection against a real Postgres: what is in noetl.execution afterwards."""

import asyncio
import copy
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import msgspec
import pytest

from noetl_core.domain.errors import ToolError
from noetl_core.domain.events import (
    AnyFact,
    CallDone,
    CommandIssued,
    CommandParked,
    Event,
    ExecutionFailed,
    ExecutionRetried,
    ExecutionStarted,
    StepEntered,
    StepExited,
)
from noetl_core.domain.fold import fold
from noetl_core.domain.ids import (
    CatalogId,
    CommandId,
    EventId,
    ExecutionId,
    RuntimeId,
    ShardId,
    StepName,
    WorkerId,
)
from noetl_core.domain.state import ExecutionState
from noetl_core.store import execution_projection, execution_shard
from noetl_core.store.event import event_of
from noetl_core.store.postgres import Pool
from noetl_projection.memory import Memory
from noetl_projection.project import project
from services.projection.logs import (
    FIRST_EXECUTION,
    SHARD_COUNT,
    Logged,
    append,
    interleaved,
    shard,
)

ALL_SHARDS = [ShardId(n) for n in range(SHARD_COUNT)]


class Held:
    """Shards under fixed epochs, for as long as no commit is refused."""

    def __init__(self, epochs: Mapping[ShardId, int]) -> None:
        self.epochs = dict(epochs)

    def held(self) -> Mapping[ShardId, int]:
        return self.epochs

    def claimed(self) -> Collection[ShardId]:
        return self.epochs.keys()

    async def lost(self, shard_ids: Collection[ShardId]) -> None:
        for shard_id in shard_ids:
            del self.epochs[shard_id]


async def take_over(pool: Pool, owner: int) -> Held:
    """Claim every shard, whoever holds it: as if its lease had run out."""
    async with pool.acquire() as conn, conn.transaction():
        await conn.execute("UPDATE noetl.execution_shard SET leased_until = NULL")
        claims = await execution_shard.claim(
            conn,
            "projection",
            RuntimeId(owner),
            instance=f"projection-{owner}",
            lease_seconds=30,
            limit=SHARD_COUNT,
        )
    return Held(dict(claims))


async def project_all(pool: Pool, shards: Held, *, batch_size: int = 500) -> int:
    memory = Memory(executions_max=1000)
    turns = 0
    while await project(pool, shards, memory, batch_size=batch_size):
        turns += 1
    return turns


async def rows(pool: Pool) -> list[str]:
    """Every byte of noetl.execution, as text."""
    found = await pool.fetch("SELECT x::text AS line FROM noetl.execution x ORDER BY execution_id")
    return [row["line"] for row in found]


def folded(logged: list[Logged]) -> dict[ExecutionId, ExecutionState]:
    states: dict[ExecutionId, ExecutionState] = {}
    for one in logged:
        execution_id = one.event.execution_id
        state = states.get(execution_id) or ExecutionState(execution_id=execution_id)
        states[execution_id] = fold(state, one.event)
    return states


async def assert_equals_the_fold(pool: Pool, logged: list[Logged]) -> None:
    found = await pool.fetch("SELECT * FROM noetl.execution")
    projected = {
        row["execution_id"]: msgspec.json.decode(row["state"], type=ExecutionState) for row in found
    }
    assert projected == folded(logged)


def log_of(*facts: AnyFact) -> list[Logged]:
    """One execution, an event a second."""
    execution_id = ExecutionId(FIRST_EXECUTION)
    return [
        Logged(
            Event(execution_id=execution_id, event_id=EventId(execution_id + 1 + n), fact=fact),
            shard(execution_id),
            datetime(2026, 11, 18, tzinfo=UTC) + timedelta(seconds=n),
        )
        for n, fact in enumerate(facts)
    ]


async def test_a_child_names_its_parent(pool: Pool, projection_pool: Pool) -> None:
    started = ExecutionStarted(
        catalog_id=CatalogId(1),
        parent_execution_id=ExecutionId(42),
        parent_command_id=CommandId("call.1#1"),
    )
    await append(pool, log_of(started))

    await project_all(projection_pool, await take_over(pool, 1))

    assert await pool.fetchval("SELECT parent_execution_id FROM noetl.execution") == 42


async def test_a_row_says_for_whom_it_waits_and_as_of_which_event(
    pool: Pool, projection_pool: Pool
) -> None:
    step, command = StepName("call"), CommandId("call.1#1")
    logged = log_of(
        ExecutionStarted(catalog_id=CatalogId(1)),
        StepEntered(step=step, visit=1),
        CommandIssued(step=step, visit=1, command_id=command),
        CommandParked(
            step=step,
            visit=1,
            command_id=command,
            worker_id=WorkerId("w"),
            kind="playbook",
            child=ExecutionId(77),
        ),
        ExecutionFailed(error=ToolError(kind="x", message="y"), step=step),
    )
    shards = await take_over(pool, 1)
    found = []
    for part in (logged[:3], logged[3:4], logged[4:]):
        await append(pool, part)
        await project_all(projection_pool, shards)
        found.append(await pool.fetchval("SELECT waits_for FROM noetl.execution"))

    assert found == [None, [logged[3].event.event_id, 77], None]


@pytest.mark.parametrize("batch_size", [1, 500])
async def test_an_execution_that_is_retried_has_not_ended_until_it_ends_again(
    pool: Pool, projection_pool: Pool, batch_size: int
) -> None:
    step = StepName("load")
    broken = ToolError(kind="http", message="bad gateway")
    logged = log_of(
        ExecutionStarted(catalog_id=CatalogId(1)),
        StepEntered(step=step, visit=1),
        ExecutionFailed(error=broken, step=step),
        ExecutionRetried(generation=1, entries=(step,)),
        StepEntered(step=step, visit=2),
        ExecutionFailed(error=broken, step=step, generation=1),
    )
    shards = await take_over(pool, 1)
    ends = []
    for upto in (3, 5, 6):
        await pool.execute("TRUNCATE noetl.event")
        await append(pool, logged[:upto])
        await project_all(projection_pool, shards, batch_size=batch_size)
        ends.append(await pool.fetchrow("SELECT status, ended_at FROM noetl.execution"))

    assert [tuple(row) for row in ends if row] == [
        ("FAILED", logged[2].created_at),
        ("RUNNING", None),
        ("FAILED", logged[5].created_at),
    ]


@pytest.mark.parametrize("seed", range(3))
async def test_the_projection_is_the_fold_of_the_whole_log(
    pool: Pool, projection_pool: Pool, seed: int
) -> None:
    logged = interleaved(seed, 30)
    await append(pool, logged)

    await project_all(projection_pool, await take_over(pool, 1))

    await assert_equals_the_fold(pool, logged)


async def test_a_row_says_what_the_log_says(pool: Pool, projection_pool: Pool) -> None:
    logged = interleaved(5, 12)
    await append(pool, logged)

    await project_all(projection_pool, await take_over(pool, 1))

    for execution_id, state in folded(logged).items():
        own = [one for one in logged if one.event.execution_id == execution_id]
        row = await pool.fetchrow(
            "SELECT * FROM noetl.execution WHERE execution_id = $1", execution_id
        )
        assert row is not None
        assert (row["path"], row["version"], row["catalog_id"]) == ("demo/flow", 3, 77)
        assert row["status"] == state.status
        assert msgspec.json.decode(row["ctx"]) == state.ctx
        assert row["started_at"] == own[0].created_at
        assert row["updated_at"] == own[-1].created_at
        assert row["ended_at"] == (own[-1].created_at if state.is_terminal else None)
        assert row["last_projected_event_id"] == own[-1].event.event_id
        assert (row["waiting_on"] is None) == state.is_terminal
        assert (row["error"] is None) == (state.error is None)
        assert set(msgspec.json.decode(row["progress"])) == set(state.steps)


async def test_truncate_and_replay_gives_the_same_bytes(pool: Pool, projection_pool: Pool) -> None:
    """However the log is cut into batches, and whatever is still in memory."""
    chance = random.Random(7)
    logged = interleaved(11, 25)
    shards = await take_over(pool, 1)
    memory = Memory(executions_max=1000)
    for start in range(0, len(logged), 40):
        await append(pool, logged[start : start + 40])
        while await project(projection_pool, shards, memory, batch_size=chance.choice([1, 6, 500])):
            pass
    first = await rows(pool)

    for batch_size, executions_max in ((500, 1000), (1, 1), (3, 5)):
        async with pool.acquire() as conn, conn.transaction():
            await execution_projection.forget_everything(conn)
        assert await rows(pool) == []
        shards, memory = await take_over(pool, 2), Memory(executions_max=executions_max)
        while await project(projection_pool, shards, memory, batch_size=batch_size):
            pass
        assert await rows(pool) == first


async def test_forgetting_everything_makes_a_running_projection_start_again(
    pool: Pool, projection_pool: Pool
) -> None:
    logged = interleaved(3, 10)
    await append(pool, logged)
    shards, memory = await take_over(pool, 1), Memory(executions_max=1000)
    await project(projection_pool, shards, memory, batch_size=100)
    async with pool.acquire() as conn, conn.transaction():
        await execution_projection.forget_everything(conn)

    # Its next commit is refused; it writes nothing and lets the shards go.
    await project(projection_pool, shards, memory, batch_size=100)
    assert await rows(pool) == []
    await project_all(projection_pool, await take_over(pool, 1))

    await assert_equals_the_fold(pool, logged)


class Killed(BaseException):
    """The process is gone: nothing behind this line runs."""


class Interrupted:
    """A pool that does something before it sends one of its statements, or after the answer."""

    def __init__(self, pool: Pool, *, at: int, act: Callable[[], Awaitable[None]], before: bool):
        self._pool = pool
        self._at = at
        self._act = act
        self._before = before
        self.statements = 0

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator["Interrupted"]:
        async with self._pool.acquire() as conn:
            self._conn = conn
            yield self

    async def fetch(self, query: str, *arguments: Any) -> Any:
        self.statements += 1
        is_moment = self.statements == self._at
        if is_moment and self._before:
            await self._act()
        answer = await self._conn.fetch(query, *arguments)
        if is_moment and not self._before:
            await self._act()
        return answer


async def rows_ahead_of_themselves(pool: Pool) -> list[int]:
    """Executions whose state knows more than the row says it does."""
    found = await pool.fetch(
        "SELECT execution_id FROM noetl.execution"
        " WHERE (state -> 'last_event_id')::bigint <> last_projected_event_id"
    )
    return [row["execution_id"] for row in found]


async def kill() -> None:
    raise Killed


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("memory_survives", [True, False])
async def test_a_kill_between_any_two_statements_neither_loses_nor_doubles(
    pool: Pool, projection_pool: Pool, before: bool, memory_survives: bool
) -> None:
    """With `memory_survives` it is a lost connection: the process goes on with what it holds."""
    logged = interleaved(21, 20)
    corrupt = logged[30]
    await append(pool, logged)
    await pool.execute(
        "UPDATE noetl.event SET event_type = 'no.such.event' WHERE event_id = $1",
        corrupt.event.event_id,
    )
    shards = await take_over(pool, 1)
    await project_all(projection_pool, shards)
    expected = await rows(pool)
    async with pool.acquire() as conn, conn.transaction():
        await execution_projection.forget_everything(conn)
        await conn.execute("TRUNCATE noetl.dead_letter")

    killed, chance = 0, random.Random(5)
    shards, memory, at = await take_over(pool, 1), Memory(executions_max=1000), 1
    while True:
        fragile = Interrupted(projection_pool, at=at, act=kill, before=before)
        try:
            while await project(
                cast("Pool", fragile), shards, memory, batch_size=chance.choice([2, 4, 8])
            ):
                pass
            break
        except Killed:
            killed += 1
            memory = memory if memory_survives else Memory(executions_max=1000)
            # Get further each time, or it would be the same kill forever.
            at = at % 7 + 1

    assert killed > 7
    assert await rows(pool) == expected
    assert await pool.fetchval("SELECT count(*) FROM noetl.dead_letter") == len(
        await pool.fetch("SELECT DISTINCT body FROM noetl.dead_letter")
    )


async def test_a_state_that_was_folded_but_not_committed_is_not_used_again(
    pool: Pool, projection_pool: Pool
) -> None:
    """The turn after it may read less, and must not write more than it has read."""
    await append(pool, interleaved(25, 4, items=20))
    shards, memory = await take_over(pool, 1), Memory(executions_max=1000)
    await project(projection_pool, shards, memory, batch_size=10)
    # Everything is in memory: the first statement reads the log, the second commits.
    fragile = Interrupted(projection_pool, at=2, act=kill, before=True)
    with pytest.raises(Killed):
        await project(cast("Pool", fragile), shards, memory, batch_size=10)

    await project(projection_pool, shards, memory, batch_size=1)

    assert await rows_ahead_of_themselves(pool) == []


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("at", range(1, 6))
async def test_a_projection_that_lost_its_shards_writes_nothing_more(
    pool: Pool, projection_pool: Pool, at: int, before: bool
) -> None:
    """Another takes over at any statement of the turn and does all the work first."""
    logged = interleaved(31, 10)
    await append(pool, logged[: len(logged) // 2])
    first, memory = await take_over(pool, 1), Memory(executions_max=1000)
    await project(projection_pool, first, memory, batch_size=4)
    written: list[str] = []

    async def other_takes_over() -> None:
        await append(pool, logged[len(logged) // 2 :])
        await project_all(projection_pool, await take_over(pool, 2))
        written.extend(await rows(pool))

    slow = Interrupted(projection_pool, at=at, act=other_takes_over, before=before)
    while await project(cast("Pool", slow), first, memory, batch_size=4):
        pass

    assert written, "the moment of the takeover never came"
    assert await rows(pool) == written
    await assert_equals_the_fold(pool, logged)
    assert first.held() == {}


async def test_two_projections_that_take_shards_from_each_other_write_each_event_once(
    pool: Pool, projection_pool: Pool
) -> None:
    logged = interleaved(41, 20, items=8)

    async def contend(owner: int) -> None:
        for _ in range(12):
            shards, memory = await take_over(pool, owner), Memory(executions_max=1000)
            while shards.held() and await project(projection_pool, shards, memory, batch_size=3):
                pass

    async def write() -> None:
        for start in range(0, len(logged), 50):
            await append(pool, logged[start : start + 50])

    await asyncio.gather(contend(1), contend(2), write())
    await project_all(projection_pool, await take_over(pool, 3))

    await assert_equals_the_fold(pool, logged)


async def test_a_new_owner_gets_the_shard_only_after_the_old_ones_commit(
    pool: Pool, projection_pool: Pool
) -> None:
    logged = [one for one in interleaved(51, 40) if one.shard_id == 3]
    await append(pool, logged)
    first = await take_over(pool, 1)
    await pool.execute("UPDATE noetl.execution_shard SET leased_until = now() - interval '1 s'")

    async def claim() -> list[execution_shard.Claim]:
        return await execution_shard.claim(
            pool, "projection", RuntimeId(2), instance="p2", lease_seconds=30, limit=SHARD_COUNT
        )

    async with projection_pool.acquire() as conn, conn.transaction():
        kept = await execution_projection.commit(
            conn, {ShardId(3): first.epochs[ShardId(3)]}, changed=[], parked=[], reached={}
        )
        assert set(kept) == {3}
        during = await claim()
    after = await claim()

    assert 3 not in [one.shard_id for one in during]
    assert [one.shard_id for one in after] == [3]


CORRUPT: dict[str, tuple[type[AnyFact], str]] = {
    "an unknown type": (StepExited, "event_type = 'no.such.event'"),
    "a fact without its fields": (StepExited, "context = NULL, node_name = NULL"),
    "a document that is no object": (StepExited, "context = '[1]'"),
    "an end of nothing": (CallDone, "command_id = 'ghost.1#1'"),
}


async def folded_with_care(pool: Pool, execution_id: ExecutionId) -> ExecutionState:
    """The fold of what the log holds now, where an event that cannot be folded never happened."""
    state = ExecutionState(execution_id=execution_id)
    for row in await pool.fetch(
        "SELECT * FROM noetl.event WHERE execution_id = $1 ORDER BY event_id", execution_id
    ):
        before = copy.deepcopy(state)
        try:
            state = fold(state, event_of(row))
        except (KeyError, ValueError, TypeError, AssertionError):
            state = before
    return state


@pytest.mark.parametrize("kind", CORRUPT)
async def test_a_corrupt_event_is_parked_once_and_the_shard_goes_on(
    pool: Pool, projection_pool: Pool, kind: str
) -> None:
    logged = interleaved(61, 20)
    fact, change = CORRUPT[kind]
    bad = next(one.event for one in logged[60:] if isinstance(one.event.fact, fact))
    await append(pool, logged)
    await pool.execute(f"UPDATE noetl.event SET {change} WHERE event_id = $1", bad.event_id)

    await project_all(projection_pool, await take_over(pool, 1), batch_size=4)
    first = await rows(pool)
    async with pool.acquire() as conn, conn.transaction():
        await execution_projection.forget_everything(conn)
    await project_all(projection_pool, await take_over(pool, 2), batch_size=500)

    assert await rows(pool) == first
    parked = await pool.fetch("SELECT * FROM noetl.dead_letter ORDER BY dead_letter_id")
    assert msgspec.json.decode(parked[0]["body"])["event_id"] == bad.event_id
    assert {p["source"] for p in parked} == {"projection"}
    assert {p["execution_id"] for p in parked} == {bad.execution_id}
    assert len({p["body"] for p in parked}) == len(parked), "one of them is parked twice"
    state = await pool.fetchval(
        "DELETE FROM noetl.execution WHERE execution_id = $1 RETURNING state", bad.execution_id
    )
    assert msgspec.json.decode(state, type=ExecutionState) == await folded_with_care(
        pool, bad.execution_id
    )
    others = [one for one in logged if one.event.execution_id != bad.execution_id]
    await assert_equals_the_fold(pool, others)


@pytest.mark.parametrize(
    ("days", "lag_ms"), [(-900, 2**31 - 1), (900, 0)], ids=["long ago", "the future"]
)
async def test_an_event_from_another_time_has_a_lag_that_fits_its_column(
    pool: Pool, projection_pool: Pool, days: int, lag_ms: int
) -> None:
    moved = [
        msgspec.structs.replace(one, created_at=one.created_at + timedelta(days=days))
        for one in interleaved(71, 2)
    ]
    await append(pool, moved)

    await project_all(projection_pool, await take_over(pool, 1))

    assert await pool.fetchval("SELECT max(lag_ms) FROM noetl.projection_checkpoint") == lag_ms


async def test_states_are_counted_as_large_as_they_are_in_their_rows(
    pool: Pool, projection_pool: Pool
) -> None:
    await append(pool, interleaved(71, 8))
    shards, memory = await take_over(pool, 1), Memory(executions_max=100)

    await project(projection_pool, shards, memory, batch_size=500)

    rows = await pool.fetch("SELECT execution_id, state FROM noetl.execution")
    found = memory.recall(row["execution_id"] for row in rows)
    assert found
    for row in rows:
        if row["execution_id"] in found:
            state = msgspec.json.encode(found[row["execution_id"]].state)
            assert found[row["execution_id"]].state_bytes == len(state)
            assert msgspec.json.decode(row["state"]) == msgspec.json.decode(state)


async def test_a_row_never_goes_back_to_an_earlier_event(pool: Pool, projection_pool: Pool) -> None:
    logged = interleaved(81, 3)
    await append(pool, logged)
    shards = await take_over(pool, 1)
    await project_all(projection_pool, shards)
    newest = await rows(pool)
    execution_id = logged[0].event.execution_id
    async with projection_pool.acquire() as conn:
        one = (await execution_projection.load(conn, [execution_id])).rows[execution_id]
        one.last_event_id, one.last_event_type = EventId(one.last_event_id - 1), "older"

        await execution_projection.commit(conn, shards.held(), changed=[one], parked=[], reached={})

    assert await rows(pool) == newest


async def test_a_turn_reads_no_more_than_its_batch_once_it_is_behind(
    pool: Pool, projection_pool: Pool
) -> None:
    logged = interleaved(91, 60)
    await append(pool, logged)
    shards, memory = await take_over(pool, 1), Memory(executions_max=1000)

    passed = [await project(projection_pool, shards, memory, batch_size=10)]
    while memory.behind:
        passed.append(await project(projection_pool, shards, memory, batch_size=10))

    assert max(passed) <= 10 * SHARD_COUNT
    assert sum(passed) == len(logged), "it was behind and did not know"


async def test_a_projection_without_work_or_shards_is_not_behind(
    pool: Pool, projection_pool: Pool
) -> None:
    """Or its loop would turn without end."""
    shards, memory = await take_over(pool, 1), Memory(executions_max=1000)
    await project(projection_pool, shards, memory, batch_size=1)
    assert memory.behind == 0
    await append(pool, interleaved(92, 40))
    await project(projection_pool, shards, memory, batch_size=1)
    assert memory.behind > 0

    await project(projection_pool, Held({}), memory, batch_size=1)

    assert memory.behind == 0


@pytest.mark.parametrize("is_away", [False, True])
async def test_what_has_ended_is_told_by_the_turn_that_showed_it_and_by_no_other(
    pool: Pool, projection_pool: Pool, is_away: bool
) -> None:
    """Neither by one without shards, nor by one that Postgres let down."""
    await append(pool, interleaved(93, 10))
    shards, memory = await take_over(pool, 1), Memory(executions_max=1000)
    await project(projection_pool, shards, memory, batch_size=500)
    assert memory.ended
    assert memory.ended_rows
    if is_away:
        fragile = Interrupted(projection_pool, at=1, act=kill, before=True)
        with pytest.raises(Killed):
            await project(cast("Pool", fragile), shards, memory, batch_size=500)
    else:
        await project(projection_pool, Held({}), memory, batch_size=500)

    assert memory.ended == []
    assert memory.ended_rows == []


async def test_no_shards_is_no_work(projection_pool: Pool) -> None:
    assert await project(projection_pool, Held({}), Memory(executions_max=1), batch_size=10) == 0
