"""The writer of the bare write path: commits what the worker reports and issues the next tasks."""

import contextlib
import sys
import time
from typing import Any, NamedTuple

import asyncpg
import msgspec
import nats
import uvloop
from nats.aio.client import Client
from nats.js.api import RetentionPolicy
from nats.js.errors import NotFoundError

from noetl_cli.bench.write_path import (
    BATCH_SUBJECT,
    STREAM,
    WAKE_SUBJECT,
    WINDOW,
    Outcome,
    WritePath,
)

_EXECUTION_ID = 1
_SHARD = 0
_STEP = "work"
_FETCH_MAX = 500
_FETCH_SECONDS = 5.0

# The real tables with their indexes and checks, and the one row that fences the writer.
_TABLES = """
DROP SCHEMA IF EXISTS noetl_write_path CASCADE;
CREATE SCHEMA noetl_write_path;
SET search_path = noetl_write_path;
CREATE TABLE event (LIKE noetl.event INCLUDING ALL) PARTITION BY RANGE (execution_id);
CREATE TABLE event_default PARTITION OF event DEFAULT;
CREATE TABLE command (LIKE noetl.command INCLUDING ALL);
CREATE TABLE result_ref (LIKE noetl.result_ref INCLUDING ALL) PARTITION BY RANGE (execution_id);
CREATE TABLE result_ref_default PARTITION OF result_ref DEFAULT;
CREATE TABLE execution_shard (LIKE noetl.execution_shard INCLUDING ALL);
INSERT INTO execution_shard (role, shard_id, epoch) VALUES ('broker', 0, 1);
"""

_DROP = "DROP SCHEMA noetl_write_path CASCADE"

_FENCE = (
    "SELECT 1 FROM execution_shard WHERE role = 'broker' AND shard_id = 0 AND epoch = 1 FOR SHARE"
)

_APPEND = """
INSERT INTO event (
    execution_id, event_id, event_key, shard_id, event_type, status, node_name, command_id, loop_id,
    iter_index, attempt, result, meta
)
SELECT 1, event_id, event_key, 0, event_type, status, 'work', command_id, 1, iter_index, 1,
       result::jsonb, meta::jsonb
FROM unnest($1::bigint[], $2::text[], $3::text[], $4::text[], $5::text[], $6::int[], $7::text[],
            $8::text[])
    AS u (event_id, event_key, event_type, status, command_id, iter_index, result, meta)
ON CONFLICT DO NOTHING RETURNING event_key
"""

_ISSUE = """
INSERT INTO command (execution_id, command_id, shard_id, step, payload)
SELECT 1, command_id, 0, 'work', payload
FROM unnest($1::text[], $2::bytea[]) AS u (command_id, payload)
"""

_CLOSE = "DELETE FROM command WHERE execution_id = 1 AND command_id = ANY ($1::text[])"

_STORE = """
INSERT INTO result_ref (execution_id, ref_id, step, store_tier, bytes, inline)
SELECT 1, ref_id, 'work', 'db', length(inline), inline
FROM unnest($1::bigint[], $2::bytea[]) AS u (ref_id, inline)
"""

_RESULT = (
    '{"status": "ok", "reference": {"ref_id": %d, "type": "db"}, "parent_ref": null, "context": {}}'
)

_decode = msgspec.msgpack.Decoder(list[Outcome]).decode
_encode = msgspec.msgpack.Encoder().encode


class EventRow(NamedTuple):
    event_id: int
    event_key: str
    event_type: str
    status: str
    command_id: str
    iter_index: int
    result: str | None = None
    meta: str | None = None


class Writer:
    def __init__(self, connection: asyncpg.Connection, n: int) -> None:
        self._connection = connection
        self._n = n
        self._issued = 0
        self._event_id = 0
        self._done = 0

    @property
    def is_done(self) -> bool:
        return self._done >= self._n

    async def commit(self, outcomes: list[Outcome]) -> int:
        """Record a batch and fill the window again: one transaction. The number of new tasks."""
        reported = [self._row_of(outcome) for outcome in outcomes]
        results = [
            (row.event_id, outcome.result)
            for row, outcome in zip(reported, outcomes, strict=True)
            if outcome.result is not None
        ]
        closed = [outcome.command_id for outcome in outcomes if outcome.result is not None]
        self._done += len(closed)
        issued = self._next_tasks()
        async with self._connection.transaction():
            await self._connection.fetchval(_FENCE)
            if reported:
                await self._connection.fetch(_APPEND, *_columns(reported))
            if closed:
                await self._connection.execute(_CLOSE, closed)
                await self._connection.execute(_STORE, *_columns(results))
            if issued:
                await self._connection.fetch(_APPEND, *_columns(issued))
                payloads = [_encode({"step": _STEP, "index": row.iter_index}) for row in issued]
                commands = [row.command_id for row in issued]
                await self._connection.execute(_ISSUE, commands, payloads)
        return len(issued)

    def _next_tasks(self) -> list[EventRow]:
        free = WINDOW - (self._issued - self._done)
        first = self._issued
        self._issued = min(first + free, self._n)
        return [
            self._row("command.issued", "PENDING", f"work.1/{i}#1", i)
            for i in range(first, self._issued)
        ]

    def _row_of(self, outcome: Outcome) -> EventRow:
        if outcome.result is None:
            return self._row("command.claimed", "RUNNING", outcome.command_id, outcome.index)
        row = self._row("call.done", "COMPLETED", outcome.command_id, outcome.index)
        return row._replace(result=_RESULT % row.event_id)

    def _row(self, event_type: str, status: str, command_id: str, index: int) -> EventRow:
        self._event_id += 1
        key = f"{event_type}:{command_id}"
        return EventRow(self._event_id, key, event_type, status, command_id, index, None, "{}")


def _columns(rows: list[Any]) -> list[tuple[Any, ...]]:
    return list(zip(*rows, strict=True))


async def write(dsn: str, nats_url: str, n: int) -> WritePath:
    connection = await asyncpg.connect(dsn)
    bus = await nats.connect(nats_url)
    stream = bus.jetstream()
    await connection.execute(_TABLES)
    with contextlib.suppress(NotFoundError):
        await stream.delete_stream(STREAM)
    await stream.add_stream(
        name=STREAM, subjects=[BATCH_SUBJECT], retention=RetentionPolicy.WORK_QUEUE
    )
    begun = time.perf_counter()
    commits = await _write_all(Writer(connection, n), bus)
    seconds = time.perf_counter() - begun
    await connection.execute(_DROP)
    await stream.delete_stream(STREAM)
    await bus.close()
    await connection.close()
    return WritePath(
        n=n,
        window=WINDOW,
        batches=commits,
        seconds=round(seconds, 3),
        tasks_per_second=round(n / seconds, 1),
    )


async def _write_all(writer: Writer, bus: Client) -> int:
    batches = await bus.jetstream().pull_subscribe(BATCH_SUBJECT, durable="writer", stream=STREAM)
    await writer.commit([])
    await bus.publish(WAKE_SUBJECT, b"")
    commits = 1
    while not writer.is_done:
        messages = await batches.fetch(_FETCH_MAX, timeout=_FETCH_SECONDS)
        outcomes = [outcome for message in messages for outcome in _decode(message.data)]
        if await writer.commit(outcomes):
            await bus.publish(WAKE_SUBJECT, b"")
        commits += 1
        for message in messages:
            await message.ack()
    return commits


if __name__ == "__main__":
    figures = uvloop.run(write(sys.argv[1], sys.argv[2], int(sys.argv[3])))
    sys.stdout.buffer.write(msgspec.json.encode(figures))
