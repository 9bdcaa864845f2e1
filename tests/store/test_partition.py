"""Partitions made ahead of time, by the role of the compactor, while others use the tables."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from noetl_core.domain.partitions import WEEK_MS, Partition, partition_of, week_start_ms
from noetl_core.process.clock import unix_ms
from noetl_core.store import partition
from noetl_core.store.postgres import Connection, Pool, open_pool

NEXT_WEEK_MS = week_start_ms(unix_ms()) + WEEK_MS
EVENTS = partition_of("event", start_ms=NEXT_WEEK_MS)
RESULTS = partition_of("result_ref", start_ms=NEXT_WEEK_MS)


@pytest.fixture
async def compactor_pool(database: str) -> AsyncIterator[Pool]:
    async with open_pool(database, role="noetl_compactor", size_max=4) as opened:
        yield opened


async def add_event(conn: Connection | Pool, execution_id: int, event_id: int = 1) -> str:
    """Append as a broker would; says in which table the row is."""
    table: str = await conn.fetchval(
        "INSERT INTO noetl.event (execution_id, event_id, event_key, shard_id, event_type)"
        " VALUES ($1, $2, $3, 0, 'step.enter') RETURNING tableoid::regclass::text",
        execution_id,
        event_id,
        f"k{event_id}",
    )
    return table


async def add_result(conn: Pool, execution_id: int) -> str:
    table: str = await conn.fetchval(
        "INSERT INTO noetl.result_ref (execution_id, ref_id, step, store_tier, bytes, inline)"
        " VALUES ($1, 1, 's', 'db', 2, '{}') RETURNING tableoid::regclass::text",
        execution_id,
    )
    return table


@pytest.mark.parametrize("edge", ["lower", "upper"])
async def test_a_row_of_the_range_lands_in_its_partition(
    pool: Pool, compactor_pool: Pool, edge: str
) -> None:
    assert await partition.ensure(compactor_pool, EVENTS) == "created"
    assert await partition.ensure(compactor_pool, RESULTS) == "created"
    inside = EVENTS.lower if edge == "lower" else EVENTS.upper - 1
    outside = EVENTS.lower - 1 if edge == "lower" else EVENTS.upper

    assert await add_event(pool, inside) == f"noetl.{EVENTS.name}"
    assert await add_result(pool, inside) == f"noetl.{RESULTS.name}"
    assert await add_event(pool, outside) == "noetl.event_default"
    assert await add_result(pool, outside) == "noetl.result_ref_default"


async def test_a_partition_has_the_keys_and_checks_of_its_parent(
    pool: Pool, compactor_pool: Pool
) -> None:
    await partition.ensure(compactor_pool, EVENTS)
    await add_event(pool, EVENTS.lower)

    with pytest.raises(asyncpg.UniqueViolationError):
        await add_event(pool, EVENTS.lower)
    with pytest.raises(asyncpg.CheckViolationError):
        await pool.execute(
            "INSERT INTO noetl.event"
            " (execution_id, event_id, event_key, shard_id, event_type, result)"
            """ VALUES ($1, 2, 'k2', 0, 'call.done', '{"rows": []}')""",
            EVENTS.lower,
        )
    plan = await pool.fetch(
        "EXPLAIN SELECT * FROM noetl.event WHERE shard_id = 1 AND event_id > 5"
        " ORDER BY event_id LIMIT 1"
    )
    assert not [row for row in plan if "Seq Scan" in row[0]], plan


async def test_the_service_roles_reach_a_new_partition_through_its_parent(
    database: str, compactor_pool: Pool
) -> None:
    await partition.ensure(compactor_pool, EVENTS)

    async with open_pool(database, role="noetl_broker", size_max=1) as broker:
        assert await add_event(broker, EVENTS.lower) == f"noetl.{EVENTS.name}"
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await broker.execute("UPDATE noetl.event SET status = 'x'")


async def test_a_second_call_finds_it_there(compactor_pool: Pool) -> None:
    await partition.ensure(compactor_pool, EVENTS)

    assert await partition.ensure(compactor_pool, EVENTS) == "exists"


async def test_of_many_calls_at_once_one_makes_it(compactor_pool: Pool) -> None:
    outcomes = await asyncio.gather(*(partition.ensure(compactor_pool, EVENTS) for _ in range(8)))

    assert sorted(outcomes) == ["created", *["exists"] * 7]


async def test_rows_that_came_too_early_stay_in_the_default_partition(
    pool: Pool, compactor_pool: Pool
) -> None:
    await add_event(pool, EVENTS.lower + 5)

    assert await partition.ensure(compactor_pool, EVENTS) == "occupied"

    assert await add_event(pool, EVENTS.lower + 6) == "noetl.event_default"
    assert await pool.fetchval("SELECT count(*) FROM noetl.event") == 2
    assert await pool.fetchval("SELECT to_regclass($1)", f"noetl.{EVENTS.name}") is None


async def test_a_row_that_is_not_committed_yet_is_waited_for_not_lost(
    pool: Pool, compactor_pool: Pool
) -> None:
    async with pool.acquire() as writer, writer.transaction():
        await add_event(writer, EVENTS.lower + 5)
        assert await partition.ensure(compactor_pool, EVENTS) == "busy"

    assert await partition.ensure(compactor_pool, EVENTS) == "occupied"
    assert await pool.fetchval("SELECT count(*) FROM noetl.event") == 1


async def test_readers_and_writers_of_other_partitions_are_not_held_up_for_long(
    pool: Pool, compactor_pool: Pool
) -> None:
    """A long transaction on the DEFAULT partition makes us give up, not the others wait."""
    async with pool.acquire() as reader, reader.transaction():
        await reader.fetch("SELECT FROM noetl.event")
        making = asyncio.create_task(partition.ensure(compactor_pool, EVENTS))
        async with asyncio.timeout(60):
            await add_event(pool, 1)
            await pool.fetch("SELECT FROM noetl.event")
        assert await making == "busy"


@pytest.mark.parametrize(
    "wrong",
    [
        Partition("command", "command_2026w01", 1, 2),
        Partition("event", "event_default", 1, 2),
        Partition("event", "result_ref_2026w01", 1, 2),
        Partition("event", 'event_2026w01"; DROP SCHEMA noetl; --', 1, 2),
        Partition("event", "event_2026w01", 2, 2),
    ],
)
async def test_the_function_makes_nothing_but_dated_partitions(
    compactor_pool: Pool, wrong: Partition
) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError):
        await partition.ensure(compactor_pool, wrong)


@pytest.mark.parametrize("role", ["noetl_broker", "noetl_reaper", "noetl_api_gateway"])
async def test_nobody_else_may_call_it(database: str, role: str) -> None:
    async with open_pool(database, role=role, size_max=1) as other:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await partition.ensure(other, EVENTS)


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE noetl.mine (a integer)",
        "DROP TABLE noetl.event_default",
        "INSERT INTO noetl.event SELECT * FROM noetl.event",
        "DELETE FROM noetl.event",
    ],
)
async def test_the_compactor_may_do_nothing_else(compactor_pool: Pool, statement: str) -> None:
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await compactor_pool.execute(statement)
