"""Hand-made work for a worker: a playbook, command rows, and an ear on what it reports."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import nats
from nats.aio.msg import Msg

from noetl_core.blob import document_of
from noetl_core.bus.streams import ensure_streams
from noetl_core.domain.brief import Brief, Element, encode_brief
from noetl_core.domain.envelope import Envelope, Reference
from noetl_core.domain.ids import CatalogId, ExecutionId, LoopId, RefId, StepName, command_id
from noetl_core.domain.result_view import value_of
from noetl_core.process.service import Service, serving
from noetl_core.store.command import CommandKey
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Claimed, Done, Failed, Message, Parked, decode_messages
from noetl_worker.config import WorkerConfig
from noetl_worker.main import start
from noetl_worker.metrics import TALLY

WAIT_SECONDS = 25.0
"""Less than what some tests make a worker wait by itself, which is half a minute."""
SHARD = 3
EXECUTION = ExecutionId(4242)


def playbook(steps: str) -> str:
    """A document around the given steps."""
    indented = "\n".join(f"  {line}" for line in steps.strip("\n").splitlines())
    return (
        f"apiVersion: noetl.io/v2\nkind: Playbook\nmetadata: {{name: t}}\nworkflow:\n{indented}\n"
    )


async def register(pool: Pool, text: str, *, catalog_id: int = 1) -> CatalogId:
    await pool.execute(
        "INSERT INTO noetl.catalog (catalog_id, path, version, content, sha256) "
        "VALUES ($1, $2, 1, $3, $4)",
        catalog_id,
        f"test/{catalog_id}",
        text,
        hashlib.sha256(text.encode()).digest(),
    )
    return CatalogId(catalog_id)


async def issue(
    pool: Pool,
    catalog_id: CatalogId,
    step: str,
    *,
    execution_id: ExecutionId = EXECUTION,
    index: int | None = None,
    element: Any = None,
    ctx: dict[str, Any] | None = None,
    steps: dict[str, Envelope] | None = None,
    payload: Envelope | None = None,
    delay: float = 0.0,
    priority: int = 0,
    target_worker: str | None = None,
    target_seconds: float = 0.0,
) -> CommandKey:
    """A pending row, as the broker would insert it."""
    name = command_id(step, 1, index=index, attempt=1)
    brief = Brief(
        catalog_id=catalog_id,
        step=StepName(step),
        visit=1,
        attempt=1,
        element=None if index is None else _element(index, element),
        ctx=ctx or {},
        steps={StepName(n): e for n, e in (steps or {}).items()},
        payload=payload,
    )
    await pool.execute(
        "INSERT INTO noetl.command (execution_id, command_id, shard_id, step, payload, priority,"
        " available_at, target_worker, target_until) VALUES ($1, $2, $3, $4, $5, $6,"
        " now() + make_interval(secs => $7), $8, now() + make_interval(secs => $9))",
        execution_id,
        name,
        SHARD,
        step,
        encode_brief(brief),
        priority,
        delay,
        target_worker,
        target_seconds,
    )
    return execution_id, name


def _element(index: int, value: Any) -> Element:
    return Element(index=index, total=100, loop_id=LoopId(7), part=0, offset=index, value=value)


async def store(pool: Pool, ref_id: int, body: bytes, *, execution_id: int = EXECUTION) -> Envelope:
    """A recorded result; gives the envelope that refers to it."""
    await pool.execute(
        "INSERT INTO noetl.result_ref (execution_id, ref_id, step, store_tier, bytes, sha256,"
        " inline) VALUES ($1, $2, 's', 'db', $3, $4, $5)",
        execution_id,
        ref_id,
        len(body),
        hashlib.sha256(body).digest(),
        body,
    )
    return Envelope(status="ok", reference=Reference(ref_id=RefId(ref_id), type="db"))


class Ear:
    """Hears what workers publish, as a broker would."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.batches: list[list[Message]] = []
        self.confirms = True
        """Whether completed commands are removed, as the broker's commit does."""

    @property
    def messages(self) -> list[Message]:
        return [message for batch in self.batches for message in batch]

    @property
    def ends(self) -> list[Done | Failed]:
        return [m for m in self.messages if isinstance(m, Done | Failed)]

    @property
    def parked(self) -> list[Parked]:
        return [m for m in self.messages if isinstance(m, Parked)]

    @property
    def claims(self) -> list[Claimed]:
        return [m for m in self.messages if isinstance(m, Claimed)]

    async def hear(self, message: Msg) -> None:
        if message.subject.endswith(".batch"):
            await self.take(message.data)

    async def take(self, body: bytes) -> None:
        batch = decode_messages(body)
        self.batches.append(batch)
        if self.confirms:
            for each in batch:
                if isinstance(each, Done | Failed | Parked):
                    await remove(self._pool, (each.execution_id, each.command_id))

    async def drain_inbox(self) -> None:
        rows = await self._pool.fetch("DELETE FROM noetl.inbox RETURNING body")
        for row in rows:
            await self.take(row["body"])

    async def end_of(self, key: CommandKey) -> Done | Failed:
        await eventually(lambda: any(_key(m) == key for m in self.ends))
        return next(m for m in self.ends if _key(m) == key)

    async def done(self, key: CommandKey) -> Any:
        """The result of a command that must have succeeded."""
        end = await self.end_of(key)
        assert isinstance(end, Done), end
        return None if end.stored is None else value_of(document_of(end.stored))

    async def failed(self, key: CommandKey) -> Failed:
        end = await self.end_of(key)
        assert isinstance(end, Failed), end
        return end


def _key(message: Done | Failed) -> CommandKey:
    return message.execution_id, message.command_id


async def remove(pool: Pool, key: CommandKey) -> None:
    await pool.execute(
        "DELETE FROM noetl.command WHERE execution_id = $1 AND command_id = $2", *key
    )


@asynccontextmanager
async def listening(url: str, pool: Pool) -> AsyncIterator[Ear]:
    client = await nats.connect(url)
    await ensure_streams(client)
    ear = Ear(pool)
    await client.subscribe("noetl.events.>", cb=ear.hear)
    await client.flush()
    try:
        yield ear
    finally:
        await client.close()


def config(dsn: str, url: str, **fields: Any) -> WorkerConfig:
    defaults: dict[str, Any] = {
        "instance": "worker-a",
        "poll_seconds": 0.2,
        "heartbeat_seconds": 0.2,
        "lease_seconds": 5.0,
        "drain_seconds": 2.0,
    }
    return WorkerConfig(postgres_dsn=dsn, nats_url=url, **{**defaults, **fields})


@asynccontextmanager
async def working(configuration: WorkerConfig) -> AsyncIterator[Service[WorkerConfig]]:
    """A whole worker, as its process would run it."""
    async with serving(Service("worker", configuration), start) as service:
        yield service


async def eventually(holds: Callable[[], object], *, seconds: float = WAIT_SECONDS) -> None:
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 - what it waits for is in another process
            await asyncio.sleep(0.005)


async def all_confirmed() -> None:
    """The worker has seen that the rows are gone: what it still says is on its way already."""
    await eventually(lambda: TALLY.held is not None and TALLY.held.unconfirmed == 0)


async def until(pool: Pool, question: str) -> None:
    """Wait until Postgres says yes."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not await pool.fetchval(question):  # noqa: ASYNC110 - Postgres does not call us
            await asyncio.sleep(0.02)
