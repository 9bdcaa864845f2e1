"""A broker without its loops: tests hand it letters and look at what it committed."""

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec

from noetl_broker.advance import Broker
from noetl_broker.states import States
from noetl_broker.turn import Letter, Turn
from noetl_core.blob.result_store import ResultStore
from noetl_core.domain.ids import CatalogId, CommandId, ExecutionId, RuntimeId, ShardId, WorkerId
from noetl_core.domain.sharding import SHARD_COUNT_DEFAULT, shard_of
from noetl_core.domain.snowflake import Snowflake
from noetl_core.process.clock import unix_ms
from noetl_core.store import command, execution_shard, inbox
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Claimed, Done, Expired, Message, Start, Stored, encode_messages

WORKER = WorkerId("worker-1")
OWNER = RuntimeId(1)
_nodes: Iterator[int] = iter(range(1, 1000))


class Desk:
    def __init__(self, pool: Pool, owner: RuntimeId = OWNER) -> None:
        self.pool = pool
        self.owner = owner
        self.claims: dict[ShardId, int] = {}
        self.snowflake = Snowflake(next(_nodes), unix_ms)
        self.mint = self.snowflake.mint
        self.states = States(states_max=100, shard_count=SHARD_COUNT_DEFAULT)
        self.broker = Broker(
            pool, ResultStore(), self.states, held=lambda: self.claims, mint=self.mint
        )

    async def claim(self, *, lease_seconds: float = 60.0) -> None:
        claimed = await execution_shard.claim(
            self.pool, "broker", self.owner, instance="desk", lease_seconds=lease_seconds, limit=16
        )
        self.claims = {claim.shard_id: claim.epoch for claim in claimed}

    async def register(self, content: str) -> CatalogId:
        catalog_id = CatalogId(self.mint())
        await self.pool.execute(
            "INSERT INTO noetl.catalog (catalog_id, path, version, content, sha256) "
            "VALUES ($1, $4, 1, $2, $3)",
            catalog_id,
            content,
            hashlib.sha256(content.encode()).digest(),
            f"path/{catalog_id}",
        )
        return catalog_id

    async def start(self, content: str, payload: Any = None) -> ExecutionId:
        execution_id = ExecutionId(self.mint())
        stored = None if payload is None else stored_json(payload)
        await self.send(
            Start(
                execution_id=execution_id,
                catalog_id=await self.register(content),
                path="p",
                version=1,
                payload=stored,
            )
        )
        return execution_id

    async def send(self, *messages: Message) -> Turn:
        return await self.broker.advance([letter_of(*messages)])

    async def empty_inbox(self) -> int:
        """Take what executions told each other, until nobody has anything to say."""
        count = 0
        while rows := await inbox.waiting(self.pool, list(self.claims), limit=500):
            count += len(rows)
            await self.broker.advance([Letter(r.shard_id, r.body, r.inbox_id) for r in rows])
        return count

    async def lease(self, limit: int = 100, worker: WorkerId = WORKER) -> list[command.Leased]:
        return await command.lease(self.pool, worker, pools=["cpu"], limit=limit, lease_seconds=60)

    async def lose(self, command_id: CommandId, *, given_back: bool = False) -> None:
        """The lease runs out, and the reaper says so."""
        execution_id = await self.pool.fetchval(
            "UPDATE noetl.command SET lease_until = now() - interval '1 s', given_back = $2"
            " WHERE command_id = $1 AND status = 'leased' RETURNING execution_id",
            command_id,
            given_back,
        )
        assert execution_id is not None, f"{command_id} is not leased"
        await self.send(Expired(execution_id=execution_id, command_id=command_id, reason="gone"))

    async def types(self, execution_id: ExecutionId) -> list[str]:
        rows = await self.pool.fetch(
            "SELECT event_type FROM noetl.event WHERE execution_id = $1 ORDER BY event_id",
            execution_id,
        )
        return [row["event_type"] for row in rows]

    async def run(self, results: dict[str, Any] | None = None) -> None:
        """Play the worker until nothing is left to lease."""
        while leased := await self.lease():
            messages: list[Message] = []
            for one in leased:
                value = (results or {}).get(one.step)
                messages += [claimed(one.execution_id, one.command_id)]
                messages += [done(one.execution_id, one.command_id, value)]
            await self.send(*messages)


def letter_of(*messages: Message) -> Letter:
    execution_id = next(m.execution_id for m in messages if hasattr(m, "execution_id"))
    shard = shard_of(execution_id, shard_count=SHARD_COUNT_DEFAULT)
    return Letter(shard, encode_messages(list(messages)))


def stored_json(value: Any) -> Stored:
    body = msgspec.json.encode(value)
    return Stored(tier="db", size=len(body), sha256=hashlib.sha256(body).digest(), inline=body)


def claimed(execution_id: ExecutionId, command_id: CommandId, worker: WorkerId = WORKER) -> Claimed:
    return Claimed(execution_id=execution_id, command_id=command_id, worker_id=worker)


def done(
    execution_id: ExecutionId, command_id: CommandId, value: Any, worker: WorkerId = WORKER
) -> Done:
    return Done(
        execution_id=execution_id,
        command_id=command_id,
        worker_id=worker,
        stored=stored_json(value),
    )
