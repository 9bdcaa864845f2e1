"""The whole service: woken by NATS, and going on without it."""

import asyncio
from collections.abc import Awaitable, Callable

from noetl_core.bus.connection import Bus
from noetl_core.domain.events import CheckpointCommitted
from noetl_core.process.service import Service, serving
from noetl_core.store.postgres import Pool
from noetl_core.wire.subjects import EPOCHS_PROJECTED, log_wake
from noetl_projection.config import ProjectionConfig
from noetl_projection.main import start
from services.projection.logs import append, interleaved

WAIT_SECONDS_MAX = 60.0


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        while not await condition():  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.02)


async def held_shards(pool: Pool) -> int:
    count: int = await pool.fetchval(
        "SELECT count(*) FROM noetl.execution_shard"
        " WHERE role = 'projection' AND leased_until > now()"
    )
    return count


async def executions(pool: Pool) -> int:
    count: int = await pool.fetchval("SELECT count(*) FROM noetl.execution")
    return count


async def test_a_wake_up_is_heard_long_before_the_next_poll(
    pool: Pool, database: str, nats_url: str, bus: Bus
) -> None:
    config = ProjectionConfig(
        postgres_dsn=database, nats_url=nats_url, projection_poll_ms=3_600_000
    )
    logged = interleaved(1, 1)
    async with serving(Service("projection", config), start):
        await until(lambda: _is(held_shards(pool), 16))
        await asyncio.sleep(0.2)
        await append(pool, logged)

        await bus.wake(log_wake(logged[0].shard_id))
        await until(lambda: _is(executions(pool), 1))

    assert await held_shards(pool) == 0, "the shards were not released at the end"


async def test_the_close_of_an_epoch_is_told_when_it_is_projected(
    pool: Pool, database: str, nats_url: str, bus: Bus
) -> None:
    told = asyncio.Event()

    async def hear(_body: bytes) -> None:
        told.set()

    await bus.subscribe(EPOCHS_PROJECTED, hear)
    logged = interleaved(1, 12)
    closes = [one for one in logged if isinstance(one.event.fact, CheckpointCommitted)]
    config = ProjectionConfig(postgres_dsn=database, nats_url=nats_url)
    async with serving(Service("projection", config), start):
        before = [one for one in logged if one.event.event_id < closes[0].event.event_id]
        await append(pool, before)
        last = before[-1].event.event_id
        await until(lambda: _is(_reached(pool), last))
        assert not told.is_set()

        await append(pool, [closes[0]])
        await asyncio.wait_for(told.wait(), WAIT_SECONDS_MAX)

    assert await _reached(pool) == closes[0].event.event_id


async def _reached(pool: Pool) -> int | None:
    found: int | None = await pool.fetchval(
        "SELECT max(last_projected_event_id) FROM noetl.projection_checkpoint"
    )
    return found


async def test_without_nats_the_log_is_polled(pool: Pool, database: str) -> None:
    config = ProjectionConfig(postgres_dsn=database, nats_url="nats://127.0.0.1:1")
    async with serving(Service("projection", config), start):
        await append(pool, interleaved(2, 5))

        await until(lambda: _is(executions(pool), 5))


async def test_a_second_projection_gets_its_share_and_the_rest_when_the_first_ends(
    pool: Pool, database: str, nats_url: str
) -> None:
    logged = interleaved(3, 20)

    def config(instance: str) -> ProjectionConfig:
        return ProjectionConfig(postgres_dsn=database, nats_url=nats_url, instance=instance)

    async def owners() -> list[tuple[str, int]]:
        rows = await pool.fetch(
            "SELECT owner_instance, count(*) FROM noetl.execution_shard"
            " WHERE role = 'projection' AND leased_until > now() GROUP BY 1 ORDER BY 1"
        )
        return [tuple(row) for row in rows]

    async with serving(Service("projection", config("b")), start):
        async with serving(Service("projection", config("a")), start):
            await until(lambda: _is(owners(), [("a", 8), ("b", 8)]))
            await append(pool, logged)
            await until(lambda: _is(executions(pool), 20))
        await until(lambda: _is(owners(), [("b", 16)]))


async def _is(found: Awaitable[object], wanted: object) -> bool:
    return await found == wanted
