"""The worker of the bare write path: leases what is there, does nothing, reports in batches."""

import asyncio
import contextlib
import sys

import asyncpg
import msgspec
import nats
import uvloop
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from noetl_cli.bench.write_path import BATCH_SUBJECT, SCHEMA, WAKE_SUBJECT, WINDOW, Outcome

_POLL_SECONDS = 0.5

_LEASE = """
WITH pending AS (
    SELECT execution_id, command_id FROM command
    WHERE pool = 'cpu' AND status = 'pending' AND available_at <= now()
    ORDER BY priority DESC, available_at LIMIT $1
    FOR UPDATE SKIP LOCKED
)
UPDATE command AS c
SET status = 'leased', worker_id = 'worker', lease_until = now() + interval '60 s'
FROM pending AS p
WHERE c.execution_id = p.execution_id AND c.command_id = p.command_id
RETURNING c.command_id, c.payload
"""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, int | str]).decode


class Flusher:
    """Sends everything that came up while the last message was on its way, as one message."""

    def __init__(self, stream: JetStreamContext) -> None:
        self._stream = stream
        self._outcomes: list[Outcome] = []
        self._wake = asyncio.Event()

    def add(self, *outcomes: Outcome) -> None:
        self._outcomes.extend(outcomes)
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._outcomes = self._outcomes, []
            if batch:
                await self._stream.publish(BATCH_SUBJECT, _encode(batch))


async def work(dsn: str, nats_url: str) -> None:
    # A lost lease re-runs a task that was not reported: it need not wait for the disk.
    settings = {"synchronous_commit": "off", "search_path": SCHEMA}
    connection = await asyncpg.connect(dsn, server_settings=settings)
    bus = await nats.connect(nats_url)
    wake = asyncio.Event()

    async def on_wake(_message: Msg) -> None:
        wake.set()

    await bus.subscribe(WAKE_SUBJECT, cb=on_wake)
    flusher = Flusher(bus.jetstream())
    flushing = asyncio.create_task(flusher.run())
    while not flushing.done():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(wake.wait(), _POLL_SECONDS)
        wake.clear()
        while await _lease_and_run(connection, flusher):
            pass
    await flushing


async def _lease_and_run(connection: asyncpg.Connection, flusher: Flusher) -> int:
    try:
        rows = await connection.fetch(_LEASE, WINDOW)
    except asyncpg.UndefinedTableError:
        return 0
    for row in rows:
        index = int(_decode(row["payload"])["index"])
        flusher.add(
            Outcome(row["command_id"], index),
            Outcome(row["command_id"], index, _encode({"index": index})),
        )
    return len(rows)


if __name__ == "__main__":
    uvloop.run(work(sys.argv[1], sys.argv[2]))
