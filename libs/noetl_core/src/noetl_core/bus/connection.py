"""The connection to NATS: it may be away at any moment, and nobody who uses it has to care.

NATS only makes things fast (Postgres keeps what was promised), so nothing here raises because NATS
is away: a wake-up is dropped, a publish answers False, a subscription comes back by itself.

Every connection is a new client. The library could reconnect the old one, but then "never
connected", "reconnecting" and "closed for good" would be three cases; here all are one:
connect, subscribe everything, wait for the end, say so, again.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import msgspec
import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg

from noetl_core.bus.cancel import cancel
from noetl_core.bus.streams import ensure_streams

CONNECT_SECONDS_MAX = 2
RETRY_SECONDS = 0.25
PUBLISH_SECONDS_MAX = 1.0
PUBLISH_SECONDS_DOUBTED = 0.25
"""After one has waited in vain the next ones wait less: a server may hang for many seconds before
its connection counts as lost."""
PING_SECONDS = 2
"""A server that hangs is given up after two of them without an answer."""
# No more than this waits to be sent; a publisher waits for the socket beyond it.
PENDING_BYTES_MAX = 8 * 1024 * 1024

NATS_ERRORS = (nats.errors.Error, OSError, TimeoutError)

log = structlog.get_logger()

Callback = Callable[[bytes], Awaitable[None]]


class _Topic(NamedTuple):
    subject: str
    queue: str
    callback: Callback


class _Acknowledged(msgspec.Struct):
    stream: str = ""
    error: msgspec.Raw | None = None


_acknowledgement = msgspec.json.Decoder(_Acknowledged)


class Bus:
    """Use `open_bus`. All methods may be called at any time, connected or not."""

    def __init__(self, url: str, *, name: str) -> None:
        self._servers = [server.strip() for server in url.split(",")]
        self._name = name
        self._client: Client | None = None
        self._connected = asyncio.Event()
        self._lost = asyncio.Event()
        self._topics: list[_Topic] = []
        self._lost_callbacks: list[Callable[[], None]] = []
        self._told = False
        self._is_doubted = False

    @property
    def is_connected(self) -> bool:
        return self._client is not None and self._client.is_connected

    @property
    def is_answering(self) -> bool:
        """Connected, and the last who published had an answer: whoever waits to be woken may."""
        return self.is_connected and not self._is_doubted

    @property
    def client(self) -> Client | None:
        """The client of the moment; None while NATS is away."""
        return self._client if self.is_connected else None

    async def wait_connected(self, seconds: float) -> bool:
        return await _happens(self._connected, seconds)

    async def wait_lost(self, seconds: float) -> bool:
        return await _happens(self._lost, seconds)

    async def wake(self, subject: str, body: bytes = b"") -> None:
        """Tell whoever listens now. Nothing happens while NATS is away."""
        client = self.client
        if client is not None:
            with suppress(*NATS_ERRORS):
                async with asyncio.timeout(PUBLISH_SECONDS_MAX):
                    await client.publish(subject, body)

    async def publish(self, subject: str, body: bytes) -> bool:
        """Store in JetStream. False when that did not happen within a second: use the inbox then.

        False may be wrong (the acknowledgement was lost); messages are idempotent for that reason.
        """
        seconds = PUBLISH_SECONDS_DOUBTED if self._is_doubted else PUBLISH_SECONDS_MAX
        try:
            async with asyncio.timeout(seconds):
                is_stored = await self._publish(subject, body)
        except (*NATS_ERRORS, msgspec.MsgspecError) as error:
            self._is_doubted = isinstance(error, TimeoutError)
            log.debug("bus.publish_failed", subject=subject, error=repr(error))
            return False
        self._is_doubted = False
        return is_stored

    async def _publish(self, subject: str, body: bytes) -> bool:
        client = self.client
        if client is None:
            return False
        try:
            answer = await client.request(subject, body, timeout=PUBLISH_SECONDS_MAX)
        except nats.errors.NoRespondersError:
            await ensure_streams(client)
            answer = await client.request(subject, body, timeout=PUBLISH_SECONDS_MAX)
        return _acknowledgement.decode(answer.data).error is None

    async def subscribe(self, subject: str, callback: Callback, *, queue: str = "") -> None:
        """Call `callback` with every body, on this connection and on all that follow."""
        topic = _Topic(subject, queue, callback)
        self._topics.append(topic)
        if self._client is not None:
            with suppress(*NATS_ERRORS):
                await _subscribe(self._client, topic)

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever a connection ends."""
        self._lost_callbacks.append(callback)

    async def run(self) -> None:
        """Connect again and again, until cancelled."""
        while True:
            try:
                await self._one_connection()
            except NATS_ERRORS as error:
                self._tell_away(error)
            except Exception:
                # A bug, here or in the library. Nobody waits for this task, and all go on without
                # NATS: to tell and try again is worth more than to end the process.
                log.exception("bus.failed")
            await asyncio.sleep(RETRY_SECONDS)

    async def _one_connection(self) -> None:
        client, closed = Client(), asyncio.Event()

        async def on_closed() -> None:
            closed.set()

        try:
            await self._connect(client, on_closed)
            self._client = client
            for topic in self._topics:
                await _subscribe(client, topic)
            self._connected.set()
            self._lost.clear()
            self._told = False
            self._is_doubted = False
            log.info("bus.connected", server=_server_of(client))
            await closed.wait()
            self._tell_away(client.last_error)
        finally:
            self._connected.clear()
            self._lost.set()
            self._client = None
            for callback in self._lost_callbacks:
                callback()
            await _close(client)

    async def _connect(self, client: Client, on_closed: Callable[[], Awaitable[None]]) -> None:
        await client.connect(
            servers=self._servers,
            name=self._name,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=RETRY_SECONDS,  # type: ignore[arg-type]
            connect_timeout=CONNECT_SECONDS_MAX,
            ping_interval=PING_SECONDS,
            max_outstanding_pings=2,
            pending_size=PENDING_BYTES_MAX,
            closed_cb=on_closed,
            error_cb=self._on_error,
        )

    async def _on_error(self, error: Exception) -> None:
        if not isinstance(error, NATS_ERRORS):
            log.error("bus.callback_failed", exc_info=error)
        elif self.is_connected:
            log.warning("bus.error", error=repr(error))
        else:
            self._tell_away(error)

    def _tell_away(self, error: Exception | None) -> None:
        if not self._told:
            self._told = True
            log.warning(
                "bus.away", servers=[_bare(url) for url in self._servers], error=repr(error)
            )


async def _happens(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


async def _subscribe(client: Client, topic: _Topic) -> None:
    async def receive(message: Msg) -> None:
        await topic.callback(message.data)

    await client.subscribe(topic.subject, queue=topic.queue, cb=receive)


async def _close(client: Client) -> None:
    with suppress(*NATS_ERRORS):
        async with asyncio.timeout(CONNECT_SECONDS_MAX):
            await client.close()


def _server_of(client: Client) -> str:
    return client.connected_url.netloc.rpartition("@")[2] if client.connected_url else ""


def _bare(url: str) -> str:
    """Without user and password."""
    return url.rpartition("@")[2]


@asynccontextmanager
async def open_bus(url: str, *, name: str) -> AsyncIterator[Bus]:
    """A bus that connects in the background; opening it never fails and never waits for long."""
    bus = Bus(url, name=name)
    running = asyncio.create_task(bus.run(), name="bus")
    # A NATS that is there answers in a few milliseconds; one that is not must not hold us up.
    await bus.wait_connected(RETRY_SECONDS)
    try:
        yield bus
    finally:
        await cancel([running])
