"""Reads the events of the shards we own from JetStream, all into one queue.

    stream NOETL_EVENTS ── a consumer per shard ── pull requests ──> inbox ──> queue

Per shard one pull request is outstanding: up to PULL_BATCH messages, or a status after
PULL_SECONDS. When it is used up the next one goes out, after its messages went into the queue; so a
full queue stops the flow, and never more than one batch per shard waits outside of it.

The consumer acknowledges "everything up to here". That is only right for a reader that saw
everything up to here, so each delivery carries the consumer's own sequence, and a gap in it (the
connection broke, another process pulled from our consumer) makes us begin anew. So does taking a
shard over: what the last owner had in flight comes at once, not after ACK_WAIT_SECONDS.

Beginning anew is a consumer with a name of its own that starts where the last one was acknowledged,
which is deleted then. Never one of the same name: it counts from 1 again, and an acknowledgement
for a delivery of its predecessor (it waits in our queue, or in a process that sleeps) would make it
believe that everything up to there is done, and drop our own acknowledgements below that.

Where somebody has deleted the last one, ours begins at the last message that this process has seen,
by its time: the stream may be another one by now. A process that has seen none begins at the start.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec
import structlog
from nats import nuid
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo, DeliverPolicy
from nats.js.client import JetStreamContext
from nats.js.errors import NotFoundError

from noetl_core.bus.cancel import cancel
from noetl_core.bus.connection import NATS_ERRORS, Bus
from noetl_core.bus.streams import API_SECONDS_MAX, MAX_AGE_SECONDS, ensure_streams
from noetl_core.domain.ids import ShardId
from noetl_core.wire.subjects import EVENT_STREAM, event_consumer, shard_events

PULL_BATCH = 200
PULL_BYTES_MAX = 16 * 1024 * 1024
PULL_SECONDS = 20.0
IDLE_SECONDS = 5.0
ACK_WAIT_SECONDS = 10.0
ACK_PENDING_MAX = 1000
QUEUE_SIZE_MAX = 2000
QUEUE_BYTES_MAX = 64 * 1024 * 1024
_SILENCE_SECONDS_MAX = 2.5 * IDLE_SECONDS
_REOPEN_SECONDS = 0.25
# The time of a message comes as a float, and may be that of the next one.
_TIME_MARGIN = timedelta(milliseconds=1)

_NANO = 1_000_000_000
_PULL = msgspec.json.encode(
    {
        "batch": PULL_BATCH,
        "max_bytes": PULL_BYTES_MAX,
        "expires": int(PULL_SECONDS * _NANO),
        "idle_heartbeat": int(IDLE_SECONDS * _NANO),
    }
)
# The request ran its course: nothing there, time over, or no room for the next message. Any other
# status (the consumer was deleted, the server shuts down) means to start again.
_SPENT = frozenset({"404", "408", "409 Message Size Exceeds MaxBytes"})
# We count messages ourselves, and have asked again when the last one came.
_IGNORED = frozenset({"100", "409 Batch Completed"})

log = structlog.get_logger()


class Delivery(NamedTuple):
    """One message. `ack` says that this one and all before it on the shard are dealt with."""

    shard: ShardId
    body: bytes
    bus: Bus
    reply: str

    async def ack(self) -> None:
        await self.bus.wake(self.reply, b"+ACK")


class DeliveryQueue(asyncio.Queue[Delivery]):
    """Full by number or by bytes, whichever comes first."""

    def __init__(self, *, size_max: int, bytes_max: int) -> None:
        super().__init__(size_max)
        self._bytes = 0
        self._bytes_max = bytes_max

    def full(self) -> bool:
        return super().full() or self._bytes >= self._bytes_max

    def _put(self, item: Delivery) -> None:
        self._bytes += len(item.body)
        super()._put(item)

    def _get(self) -> Delivery:
        item: Delivery = super()._get()
        self._bytes -= len(item.body)
        return item


class ShardConsumer:
    """Use `open_consumer`. What arrives for the shards added is in `queue`."""

    def __init__(self, bus: Bus) -> None:
        self.queue = DeliveryQueue(size_max=QUEUE_SIZE_MAX, bytes_max=QUEUE_BYTES_MAX)
        self._bus = bus
        self._pulls: dict[ShardId, _Pull] = {}
        bus.on_lost(self._interrupt)

    async def add(self, shard: ShardId) -> None:
        """Read this shard from now on. Does not wait: while NATS is away it begins later."""
        if shard not in self._pulls:
            self._pulls[shard] = _Pull(shard, self._bus, self.queue)

    async def remove(self, shard: ShardId) -> None:
        """Read it no more. What is in the queue already stays there."""
        pull = self._pulls.pop(shard, None)
        if pull is not None:
            await pull.close()

    async def close(self) -> None:
        for shard in list(self._pulls):
            await self.remove(shard)

    def _interrupt(self) -> None:
        for pull in self._pulls.values():
            pull.interrupt()


@asynccontextmanager
async def open_consumer(bus: Bus) -> AsyncIterator[ShardConsumer]:
    consumer = ShardConsumer(bus)
    try:
        yield consumer
    finally:
        await consumer.close()


class _Pull:
    """The reading of one shard: a task that opens the consumer, and opens it again when needed."""

    def __init__(self, shard: ShardId, bus: Bus, queue: DeliveryQueue) -> None:
        self._shard = shard
        self._bus = bus
        self._queue = queue
        self._consumer = ""
        self._client: Client | None = None
        self._subscription: Subscription | None = None
        self._inbox = ""
        self._remaining = 0
        self._next_sequence = 1
        self._seen_at: datetime | None = None
        self._heard_at = 0.0
        self._broken = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"consume.{shard}")

    async def close(self) -> None:
        await cancel([self._task])

    def interrupt(self) -> None:
        """Start again: the connection is gone."""
        self._broken.set()

    async def _run(self) -> None:
        while True:
            try:
                if await self._open():
                    await self._until_broken()
            except NATS_ERRORS as error:
                log.debug("consumer.delayed", shard_id=self._shard, error=repr(error))
            except Exception:
                log.exception("consumer.failed", shard_id=self._shard)
            finally:
                await self._leave()
            await asyncio.sleep(_REOPEN_SECONDS)

    async def _open(self) -> bool:
        await self._bus.wait_connected(_SILENCE_SECONDS_MAX)
        client = self._bus.client
        if client is None:
            return False
        self._broken.clear()
        self._consumer = await _begin_anew(client, self._shard, seen_at=self._seen_at)
        self._next_sequence = 1
        self._inbox = client.new_inbox()
        self._subscription = await client.subscribe(self._inbox, cb=self._receive)
        self._client = client
        await self._request()
        return True

    async def _until_broken(self) -> None:
        """Until a status, a gap, silence or a lost connection says that this must start again."""
        while not self._broken.is_set() and not self._is_silent():
            with suppress(TimeoutError):
                async with asyncio.timeout(IDLE_SECONDS):
                    await self._broken.wait()

    def _is_silent(self) -> bool:
        # A receiver that waits for room in the queue hears nothing, and that is no fault of NATS.
        waiting = self._queue.full()
        return not waiting and _now() - self._heard_at > _SILENCE_SECONDS_MAX

    async def _leave(self) -> None:
        subscription, self._subscription, self._client = self._subscription, None, None
        if subscription is not None:
            with suppress(*NATS_ERRORS):
                await subscription.unsubscribe()

    async def _request(self) -> None:
        if self._client is not None:
            self._remaining = PULL_BATCH
            self._heard_at = _now()
            subject = f"$JS.API.CONSUMER.MSG.NEXT.{EVENT_STREAM}.{self._consumer}"
            await self._client.publish(subject, _PULL, reply=self._inbox)

    async def _receive(self, message: Msg) -> None:
        self._heard_at = _now()
        status = _status_of(message) if message.subject == self._inbox else None
        if status is None:
            await self._deliver(message)
        elif status in _SPENT:
            await self._request()
        elif status not in _IGNORED:
            log.info("consumer.interrupted", shard_id=self._shard, status=status)
            self._broken.set()

    async def _deliver(self, message: Msg) -> None:
        metadata = message.metadata
        sequence = metadata.sequence.consumer
        if sequence != self._next_sequence:
            log.warning("consumer.gap", shard_id=self._shard, sequence=sequence)
            self._broken.set()
        if self._broken.is_set():
            return
        self._next_sequence = sequence + 1
        await self._queue.put(Delivery(self._shard, message.data, self._bus, message.reply))
        self._seen_at = metadata.timestamp
        self._remaining -= 1
        if self._remaining == 0:
            await self._request()


async def _begin_anew(client: Client, shard: ShardId, *, seen_at: datetime | None) -> str:
    """A new consumer of the shard in place of those there are. Says its name.

    Dying in between leaves several: the next to begin takes up from the furthest, deletes all.
    """
    jetstream = client.jetstream(timeout=API_SECONDS_MAX)
    try:
        last = await _consumers_of(jetstream, shard)
    except NotFoundError:
        await ensure_streams(client)
        last = []
    name = event_consumer(shard, nuid.NUID().next().decode())
    if last or seen_at is None:
        floor = max((info.ack_floor.stream_seq for info in last if info.ack_floor), default=0)
        config = _consumer(name, shard, start=floor + 1)
    else:
        config = _consumer_at(name, shard, seen_at)
    await jetstream.add_consumer(EVENT_STREAM, config)
    for info in last:
        with suppress(NotFoundError):
            await jetstream.delete_consumer(EVENT_STREAM, info.name)
    return name


async def _consumers_of(jetstream: JetStreamContext, shard: ShardId) -> list[ConsumerInfo]:
    found: list[ConsumerInfo] = []
    page = await jetstream.consumers_info(EVENT_STREAM)
    offset = len(page)
    while page:
        found += [info for info in page if info.name.startswith(event_consumer(shard))]
        page = await jetstream.consumers_info(EVENT_STREAM, offset)
        offset += len(page)
    return found


def _consumer(name: str, shard: ShardId, *, start: int) -> ConsumerConfig:
    return ConsumerConfig(
        name=name,
        durable_name=name,
        deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=start,
        ack_policy=AckPolicy.ALL,
        ack_wait=ACK_WAIT_SECONDS,
        max_ack_pending=ACK_PENDING_MAX,
        filter_subject=shard_events(shard),
        # Of a shard that is gone: nobody pulls, and what was in the stream is gone by then, too.
        inactive_threshold=MAX_AGE_SECONDS,
    )


def _consumer_at(name: str, shard: ShardId, seen_at: datetime) -> ConsumerConfig:
    return _consumer(name, shard, start=0).evolve(
        deliver_policy=DeliverPolicy.BY_START_TIME,
        opt_start_seq=None,
        opt_start_time=seen_at - _TIME_MARGIN,
    )


def _status_of(message: Msg) -> str:
    """`408`, or `409 Consumer Deleted`: 409 alone says little."""
    headers = message.headers or {}
    code = headers.get("Status", "")
    return f"409 {headers.get('Description', '')}" if code == "409" else code


def _now() -> float:
    return asyncio.get_running_loop().time()
