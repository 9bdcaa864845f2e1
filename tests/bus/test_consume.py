"""bus/consume.py: everything that was stored arrives, whatever happens to NATS meanwhile."""

import asyncio
import time
from collections.abc import AsyncIterator

import nats
import pytest
from nats.aio.client import Client

from noetl_core.bus import connection, consume
from noetl_core.bus.connection import Bus, open_bus
from noetl_core.bus.consume import Delivery, DeliveryQueue, ShardConsumer, open_consumer
from noetl_core.domain.ids import ShardId
from noetl_core.wire.subjects import EVENT_STREAM, event_batch, event_consumer
from support.nats import NatsServer

SHARD, OTHER = ShardId(3), ShardId(4)
SECONDS_MAX = 60


@pytest.fixture(autouse=True)
def _acknowledgements_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine; sent again, a message would arrive twice."""
    monkeypatch.setattr(connection, "PUBLISH_SECONDS_MAX", SECONDS_MAX)


@pytest.fixture
async def consumer(bus: Bus) -> AsyncIterator[ShardConsumer]:
    async with open_consumer(bus) as opened:
        yield opened


async def send(bus: Bus, count: int, *, shard: ShardId = SHARD, first: int = 0) -> None:
    for number in range(first, first + count):
        assert await bus.publish(event_batch(shard), str(number).encode())


async def receive(consumer: ShardConsumer, count: int) -> list[Delivery]:
    async with asyncio.timeout(SECONDS_MAX):
        return [await consumer.queue.get() for _ in range(count)]


async def receive_until(consumer: ShardConsumer, body: bytes) -> list[bytes]:
    """Everything up to that body, each acknowledged."""
    bodies: list[bytes] = []
    async with asyncio.timeout(SECONDS_MAX):
        while not bodies or bodies[-1] != body:
            delivery = await consumer.queue.get()
            await delivery.ack()
            bodies.append(delivery.body)
    return bodies


async def name_of_consumer(client: Client) -> str:
    """Of SHARD; there is never more than one."""
    found = await client.jetstream().consumers_info(EVENT_STREAM)
    (name,) = (info.name for info in found if info.name.startswith(event_consumer(SHARD)))
    return str(name)


def numbers(deliveries: list[Delivery]) -> list[int]:
    return [int(delivery.body) for delivery in deliveries]


async def test_messages_of_a_shard_arrive_in_order_across_batches(
    bus: Bus, consumer: ShardConsumer
) -> None:
    count = consume.PULL_BATCH * 2 + 10
    await send(bus, count)

    await consumer.add(SHARD)

    deliveries = await receive(consumer, count)
    assert numbers(deliveries) == list(range(count))
    assert {delivery.shard for delivery in deliveries} == {SHARD}


async def test_shards_that_were_not_added_do_not_arrive(bus: Bus, consumer: ShardConsumer) -> None:
    await consumer.add(SHARD)
    await send(bus, 1, shard=OTHER)
    await send(bus, 1, first=7)

    assert numbers(await receive(consumer, 1)) == [7]
    assert consumer.queue.empty()


async def test_a_removed_shard_arrives_no_more(bus: Bus, consumer: ShardConsumer) -> None:
    await consumer.add(SHARD)
    await consumer.add(OTHER)
    await send(bus, 1)
    await receive(consumer, 1)

    await consumer.remove(SHARD)
    await send(bus, 1)
    await send(bus, 1, shard=OTHER, first=9)

    assert numbers(await receive(consumer, 1)) == [9]
    assert consumer.queue.empty()


async def test_a_message_arrives_within_milliseconds_of_its_publication(
    bus: Bus, consumer: ShardConsumer
) -> None:
    await consumer.add(SHARD)
    await send(bus, 20)
    await receive(consumer, 20)

    # Where there is a wait, each has it; a busy machine keeps most of them waiting, never all.
    quick = 0
    for _ in range(50):
        began = time.perf_counter()
        await send(bus, 1)
        await receive(consumer, 1)
        quick += time.perf_counter() - began < 0.01
        if quick == 5:
            return
    raise AssertionError(f"{quick} of fifty came within ten milliseconds")


async def test_the_next_owner_gets_at_once_what_the_last_did_not_acknowledge(
    bus: Bus, nats_url: str
) -> None:
    await send(bus, 10)
    async with open_bus(nats_url, name="last") as last, open_consumer(last) as dying:
        await dying.add(SHARD)
        deliveries = await receive(dying, 10)
        await deliveries[3].ack()
        await last.publish(event_batch(OTHER), b"")  # a round trip: the ack has arrived

    began = time.monotonic()
    async with open_consumer(bus) as successor:
        await successor.add(SHARD)
        taken = numbers(await receive(successor, 6))

    assert taken == [4, 5, 6, 7, 8, 9]
    assert time.monotonic() - began < consume.ACK_WAIT_SECONDS / 2


async def test_what_another_reader_of_our_consumer_took_is_not_lost(
    bus: Bus, consumer: ShardConsumer, nats_url: str
) -> None:
    """A sleeper that still pulls: an acknowledgement of ours must not cover what it swallowed."""
    await consumer.add(SHARD)
    await send(bus, 1)
    for delivery in await receive(consumer, 1):
        await delivery.ack()
    thief = await nats.connect(nats_url)
    subscription = await thief.jetstream().pull_subscribe_bind(
        durable=await name_of_consumer(thief), stream=EVENT_STREAM
    )
    fetching = asyncio.create_task(subscription.fetch(1, timeout=SECONDS_MAX))
    await asyncio.sleep(0.1)
    await thief.flush()  # a round trip: it is known to NATS that it waits

    for number in range(1, 20):
        await send(bus, 1, first=number)
    bodies = {int(body) for body in await receive_until(consumer, b"19")}

    assert len(await fetching) == 1
    await thief.close()
    assert bodies == set(range(1, 20))


@pytest.mark.parametrize("way", ["regained", "reconnected"])
async def test_late_acknowledgements_do_not_stop_who_began_anew(
    bus: Bus, consumer: ShardConsumer, way: str
) -> None:
    """A consumer counts from 1: one that is told of sequences of its predecessor would be deaf."""
    before = consume.ACK_PENDING_MAX * 3
    await consumer.add(SHARD)
    await send(bus, before)
    await receive_until(consumer, str(before - 501).encode())
    late = await receive(consumer, 500)
    if way == "regained":
        await consumer.remove(SHARD)
        await consumer.add(SHARD)
    else:
        assert bus.client is not None
        await bus.client.close()
    again = await receive(consumer, 500)
    assert numbers(again) == numbers(late)
    for delivery in (*late, *again):
        await delivery.ack()

    after = consume.ACK_PENDING_MAX + 500
    await send(bus, after, first=before)
    began = time.monotonic()
    bodies = await receive_until(consumer, str(before + after - 1).encode())

    assert len(bodies) == after
    assert time.monotonic() - began < consume.ACK_WAIT_SECONDS / 2


async def test_a_stream_that_is_deleted_is_made_again_and_read_from(
    bus: Bus, consumer: ShardConsumer, nats_url: str
) -> None:
    await consumer.add(SHARD)
    await send(bus, 3)
    await receive(consumer, 3)
    client = await nats.connect(nats_url)
    await client.jetstream().delete_stream(EVENT_STREAM)
    await client.close()

    await send(bus, 3, first=10)

    assert numbers(await receive(consumer, 3)) == [10, 11, 12]


async def test_a_consumer_that_is_deleted_is_made_again(
    bus: Bus, consumer: ShardConsumer, nats_url: str
) -> None:
    await consumer.add(SHARD)
    await send(bus, 3)
    await receive_until(consumer, b"2")
    client = await nats.connect(nats_url)
    await client.jetstream().delete_consumer(EVENT_STREAM, await name_of_consumer(client))
    await client.close()

    await send(bus, 1, first=10)

    assert b"10" in await receive_until(consumer, b"10")


async def test_a_consumer_that_is_deleted_does_not_read_the_whole_stream_again(
    bus: Bus, consumer: ShardConsumer, nats_url: str
) -> None:
    await consumer.add(SHARD)
    await send(bus, 20)
    await receive_until(consumer, b"19")
    await asyncio.sleep(0.01)
    client = await nats.connect(nats_url)
    await client.jetstream().delete_consumer(EVENT_STREAM, await name_of_consumer(client))
    await client.close()

    await send(bus, 5, first=20)

    again = await receive_until(consumer, b"24")
    assert again[-5:] == [b"20", b"21", b"22", b"23", b"24"]
    # The last one that was seen may come once more, and what came within a millisecond of it.
    assert b"0" not in again


async def test_a_stream_that_is_made_anew_is_read_from_its_start_whatever_was_seen_before(
    bus: Bus, consumer: ShardConsumer, nats_url: str
) -> None:
    """Its numbers begin at one again, below those that were seen."""
    await consumer.add(SHARD)
    await send(bus, 20)
    await receive_until(consumer, b"19")
    client = await nats.connect(nats_url)
    await client.jetstream().delete_stream(EVENT_STREAM)
    await client.close()

    await send(bus, 3, first=100)

    assert await receive_until(consumer, b"102") == [b"100", b"101", b"102"]


@pytest.mark.parametrize("way", ["stop", "kill"])
async def test_consumption_goes_on_after_nats_restarts(own_nats: NatsServer, way: str) -> None:
    async with open_bus(own_nats.url, name="test") as bus, open_consumer(bus) as consumer:
        assert await bus.wait_connected(SECONDS_MAX)
        await consumer.add(SHARD)
        await consumer.add(OTHER)
        await send(bus, 5)
        await receive_until(consumer, b"4")
        getattr(own_nats, way)()
        assert await bus.wait_lost(SECONDS_MAX)
        own_nats.start()
        assert await bus.wait_connected(SECONDS_MAX)

        await send(bus, 5, first=10)

        bodies = await receive_until(consumer, b"14")
    assert [b for b in bodies if len(b) == 2] == [b"10", b"11", b"12", b"13", b"14"]


async def test_consumption_goes_on_after_nats_lost_everything(own_nats: NatsServer) -> None:
    async with open_bus(own_nats.url, name="test") as bus, open_consumer(bus) as consumer:
        assert await bus.wait_connected(SECONDS_MAX)
        await consumer.add(SHARD)
        await send(bus, 5)
        await receive(consumer, 5)
        own_nats.kill()
        assert await bus.wait_lost(SECONDS_MAX)
        own_nats.wipe()
        own_nats.start()
        assert await bus.wait_connected(SECONDS_MAX)

        await send(bus, 2, first=10)

        assert numbers(await receive(consumer, 2)) == [10, 11]


async def test_a_shard_can_be_added_while_nats_is_away(own_nats: NatsServer) -> None:
    own_nats.stop()
    async with open_bus(own_nats.url, name="test") as bus, open_consumer(bus) as consumer:
        await consumer.add(SHARD)
        own_nats.start()
        assert await bus.wait_connected(SECONDS_MAX)

        await send(bus, 2)

        assert numbers(await receive(consumer, 2)) == [0, 1]


async def test_a_full_queue_stops_the_flow_and_loses_nothing(
    bus: Bus, consumer: ShardConsumer
) -> None:
    consumer.queue = DeliveryQueue(size_max=10, bytes_max=10**6)
    count = consume.PULL_BATCH + 50
    await send(bus, count)

    await consumer.add(SHARD)
    async with asyncio.timeout(SECONDS_MAX):
        while consumer.queue.qsize() < 10:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)

    assert consumer.queue.qsize() == 10
    assert numbers(await receive(consumer, count)) == list(range(count))


async def test_a_queue_is_full_by_bytes_too(bus: Bus) -> None:
    queue = DeliveryQueue(size_max=100, bytes_max=10)
    queue.put_nowait(Delivery(SHARD, b"12345678901", bus, ""))

    with pytest.raises(asyncio.QueueFull):
        queue.put_nowait(Delivery(SHARD, b"1", bus, ""))
    queue.get_nowait()
    queue.put_nowait(Delivery(SHARD, b"1", bus, ""))
