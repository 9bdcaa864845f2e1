"""bus/connection.py: NATS may be away at any moment, and nothing raises because of it."""

import asyncio
import time

import nats
import pytest

from noetl_core.bus.connection import PUBLISH_SECONDS_MAX, Bus, open_bus
from noetl_core.bus.streams import ensure_streams
from noetl_core.domain.ids import ShardId
from noetl_core.wire.subjects import EVENT_STREAM, event_batch, inbox_wake
from support.nats import NatsServer
from support.postgres import free_port

SHARD = ShardId(3)
WAKE = inbox_wake(SHARD)
BATCH = event_batch(SHARD)
SECONDS_MAX = 60
TRIES = 3
"""Of what is held against a time: for a while the machine may be somebody else's."""


async def until_published(bus: Bus) -> None:
    """An acknowledgement may come too late on a busy machine; then the message is sent again."""
    assert await bus.wait_connected(SECONDS_MAX)
    async with asyncio.timeout(SECONDS_MAX):
        while not await bus.publish(BATCH, b"body"):  # noqa: ASYNC110 - NATS does not call us
            await asyncio.sleep(0.05)


async def test_a_wake_up_reaches_a_subscriber(bus: Bus) -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    await bus.subscribe(WAKE, heard.put)

    await bus.wake(WAKE, b"now")

    assert await asyncio.wait_for(heard.get(), SECONDS_MAX) == b"now"


async def test_a_callback_that_fails_is_called_for_the_next_message(bus: Bus) -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def callback(body: bytes) -> None:
        if body == b"bad":
            raise ZeroDivisionError
        heard.put_nowait(body)

    await bus.subscribe(WAKE, callback)
    await bus.wake(WAKE, b"bad")
    await bus.wake(WAKE, b"good")

    assert await asyncio.wait_for(heard.get(), SECONDS_MAX) == b"good"


async def test_of_a_queue_group_one_subscriber_hears_a_wake_up(bus: Bus, nats_url: str) -> None:
    heard: list[str] = []

    async def first(_body: bytes) -> None:
        heard.append("first")

    async def second(_body: bytes) -> None:
        heard.append("second")

    await bus.subscribe(WAKE, first, queue="workers")
    async with open_bus(nats_url, name="other") as other:
        await other.subscribe(WAKE, second, queue="workers")
        await other.publish(BATCH, b"")  # a round trip: the subscriptions are known to NATS
        for _ in range(20):
            await bus.wake(WAKE)
        await bus.publish(BATCH, b"")
        await other.publish(BATCH, b"")

    assert len(heard) == 20


async def test_publishing_makes_the_stream_and_stores_the_message(bus: Bus, nats_url: str) -> None:
    stored = await bus.publish(BATCH, b"body")

    client = await nats.connect(nats_url)
    message = await client.jetstream().get_last_msg(EVENT_STREAM, BATCH)
    await client.close()
    assert stored
    assert message.data == b"body"


async def test_publishing_makes_the_stream_again_when_it_was_deleted(
    bus: Bus, nats_url: str
) -> None:
    await bus.publish(BATCH, b"first")
    client = await nats.connect(nats_url)
    await client.jetstream().delete_stream(EVENT_STREAM)
    await client.close()

    assert await bus.publish(BATCH, b"second")


async def test_a_stream_that_was_made_otherwise_is_corrected(nats_url: str) -> None:
    client = await nats.connect(nats_url)
    jetstream = client.jetstream()
    await jetstream.add_stream(name=EVENT_STREAM, subjects=["noetl.events.>"], max_age=5)

    await ensure_streams(client)

    info = await jetstream.stream_info(EVENT_STREAM)
    await client.close()
    assert info.config.max_age == 3600


async def test_what_we_do_not_ask_of_a_stream_stays_as_it_is(nats_url: str) -> None:
    """Else the first publisher would take back the replicas that somebody has given it."""
    client = await nats.connect(nats_url)
    jetstream = client.jetstream()
    await jetstream.add_stream(
        name=EVENT_STREAM, subjects=["noetl.events.>"], max_age=5, description="kept"
    )

    await ensure_streams(client)

    config = (await jetstream.stream_info(EVENT_STREAM)).config
    await client.close()
    assert (config.max_age, config.description) == (3600, "kept")


async def test_opening_a_bus_does_not_fail_while_nats_is_away() -> None:
    began = time.monotonic()
    async with open_bus(f"nats://127.0.0.1:{free_port()}", name="test") as bus:
        await bus.wake(WAKE)
        stored = await bus.publish(BATCH, b"body")

    assert not stored
    assert time.monotonic() - began < 2


async def test_a_bus_connects_when_nats_comes_later(own_nats: NatsServer) -> None:
    own_nats.stop()
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    async with open_bus(own_nats.url, name="test") as bus:
        await bus.subscribe(WAKE, heard.put)
        own_nats.start()

        assert await bus.wait_connected(SECONDS_MAX)
        await bus.wake(WAKE, b"now")
        assert await asyncio.wait_for(heard.get(), SECONDS_MAX) == b"now"
        await until_published(bus)


@pytest.mark.parametrize("way", ["stop", "kill"])
async def test_subscriptions_come_back_after_a_restart(own_nats: NatsServer, way: str) -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    async with open_bus(own_nats.url, name="test") as bus:
        await bus.subscribe(WAKE, heard.put)
        assert await bus.wait_connected(SECONDS_MAX)
        getattr(own_nats, way)()
        assert await bus.wait_lost(SECONDS_MAX)
        during = await bus.publish(BATCH, b"body")
        own_nats.start()

        assert await bus.wait_connected(SECONDS_MAX)
        await bus.wake(WAKE, b"again")
        assert await asyncio.wait_for(heard.get(), SECONDS_MAX) == b"again"
        assert not during


async def test_a_nats_that_does_not_answer_costs_a_publisher_a_second(
    own_nats: NatsServer,
) -> None:
    waited = []
    async with open_bus(own_nats.url, name="test") as bus:
        await until_published(bus)
        for _ in range(TRIES):
            own_nats.pause()
            began = time.monotonic()
            stored = await bus.publish(BATCH, b"second")
            waited.append(time.monotonic() - began)
            own_nats.resume()

            assert not stored
            await until_published(bus)
            if waited[-1] < 1.5:
                return
    raise AssertionError(waited)


async def test_a_nats_that_goes_on_not_answering_costs_each_publisher_less(
    own_nats: NatsServer,
) -> None:
    waited = []
    async with open_bus(own_nats.url, name="test") as bus:
        await until_published(bus)
        own_nats.pause()
        assert not await bus.publish(BATCH, b"second")
        for _ in range(TRIES):
            began = time.monotonic()
            assert not await bus.publish(BATCH, b"more")
            waited.append(time.monotonic() - began)
        own_nats.resume()

    assert min(waited) < PUBLISH_SECONDS_MAX / 2
