"""bus/connection.py against a real NATS."""

import asyncio

from noetl_core.bus.connection import Bus


async def test_a_wake_up_reaches_a_subscriber(bus: Bus) -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    await bus.subscribe("noetl.inbox.3", heard.put)

    await bus.wake("noetl.inbox.3", b"now")

    assert await asyncio.wait_for(heard.get(), 2) == b"now"
