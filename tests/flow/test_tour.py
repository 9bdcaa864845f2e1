"""The tour: one execution in six hops, each called as the function that does it in production.

client ─1─> gateway ──> inbox ─2─> broker ──> command ─3─> worker ──> report ─4─> broker
client <─6─ gateway <── noetl.execution <─5─ projection <── noetl.event <────────────┘
"""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import httpx

from noetl_api_gateway.app import build_app
from noetl_api_gateway.endpoint import Gateway
from noetl_api_gateway.ends import EndWatch
from noetl_api_gateway.rendering import open_renderer
from noetl_broker.advance import Broker
from noetl_broker.states import States
from noetl_broker.turn import Letter
from noetl_core.blob import ResultStore
from noetl_core.bus.connection import Bus
from noetl_core.domain.ids import RuntimeId, ShardId, WorkerId
from noetl_core.domain.sharding import SHARD_COUNT_DEFAULT
from noetl_core.domain.snowflake import Snowflake
from noetl_core.process.clock import unix_ms
from noetl_core.store import command, execution_shard, inbox
from noetl_core.store.command import Leased
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Claimed, Done, Failed, Parked, encode_messages
from noetl_projection.memory import Memory
from noetl_projection.project import project
from noetl_worker.credentials import Credentials
from noetl_worker.perform import Performer
from noetl_worker.plan import Plans
from noetl_worker.tools.noop import NoopTool
from noetl_worker.tools.registry import Registry

PLAYBOOK = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: tour}
workload: {name: nobody}
workflow:
  - step: greet
    tool: {kind: noop, value: {text: "hello {{ workload.name }}"}}
    next: {arcs: [{step: repeat, when: "{{ output.data.text | length > 5 }}"}]}
  - step: repeat
    tool: {kind: noop, value: "{{ greet.text }}!"}
"""

WORKER = WorkerId("worker-1")
mint = Snowflake(node=7, now_ms=unix_ms).mint
results = ResultStore()


async def test_one_execution_in_six_hops(pool: Pool, bus: Bus) -> None:
    brokers, projections = await Owned.claim(pool, "broker"), await Owned.claim(pool, "projection")
    broker = a_broker(pool, brokers)

    async with a_gateway(pool, bus) as client:
        # 1. The gateway commits the request to the inbox, then answers.
        await client.post("/api/catalog/register", json={"content": PLAYBOOK})
        request = {"path": "tour", "payload": {"name": "you"}}
        accepted = (await client.post("/api/execute", json=request)).json()
        assert accepted["status"] == "PENDING"

        # 2. The broker reads it, decides, and commits events and the first command at once.
        await broker.advance(await letters_from_inbox(pool, brokers))
        assert await event_types(pool) == ["execution.started", "step.enter", "command.issued"]

        # 3. A worker leases the command and runs its tool.
        (leased,) = await lease(pool)
        report = await a_performer(pool).perform(leased)
        assert isinstance(report, Done)

        # 4. The broker records the report, and what follows from it: the step is left, the next
        #    one entered, its command issued.
        await broker.advance([letter(leased, report)])
        assert (await event_types(pool))[3:] == [
            "command.claimed",
            "call.done",
            "step.exit",
            "step.enter",
            "command.issued",
        ]
        (leased,) = await lease(pool)
        await broker.advance([letter(leased, await a_performer(pool).perform(leased))])

        # 5. The projection folds the log into a status row.
        assert await project(pool, projections, Memory(executions_max=10), batch_size=500) > 0

        # 6. The gateway answers from that row, with the results behind their references.
        found = (await client.get(f"/api/executions/{accepted['execution_id']}")).json()
        assert found["status"] == "COMPLETED"
        steps = (await client.get(f"/api/executions/{accepted['execution_id']}/steps")).json()
        assert steps["repeat"]["result"] == "hello you!"


class Owned:
    """All shards of a role, held for the length of the test."""

    def __init__(self, epochs: dict[ShardId, int]) -> None:
        self._epochs = epochs

    @classmethod
    async def claim(cls, pool: Pool, role: str) -> "Owned":
        claims = await execution_shard.claim(
            pool, role, RuntimeId(1), instance="tour", lease_seconds=60, limit=SHARD_COUNT_DEFAULT
        )
        return cls({claim.shard_id: claim.epoch for claim in claims})

    def held(self) -> dict[ShardId, int]:
        return self._epochs

    def claimed(self) -> Collection[ShardId]:
        return self._epochs.keys()

    async def lost(self, shard_ids: Any) -> None:
        raise AssertionError(shard_ids)


@asynccontextmanager
async def a_gateway(pool: Pool, bus: Bus) -> AsyncIterator[httpx.AsyncClient]:
    async with open_renderer() as renderer:
        gateway = Gateway(
            pool=pool,
            bus=bus,
            mint=mint,
            results=results,
            keyring=None,
            ends=EndWatch(pool),
            renderer=renderer,
        )
        transport = httpx.ASGITransport(build_app(gateway))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            yield client


def a_broker(pool: Pool, owned: Owned) -> Broker:
    states = States(states_max=10, shard_count=SHARD_COUNT_DEFAULT)
    return Broker(pool, results, states, held=owned.held, mint=mint)


def a_performer(pool: Pool) -> Performer:
    return Performer(
        pool,
        worker_id=WORKER,
        plans=Plans(pool),
        results=results,
        tools=Registry([NoopTool()]),
        credentials=Credentials(pool, None),
    )


async def letters_from_inbox(pool: Pool, owned: Owned) -> list[Letter]:
    rows = await inbox.waiting(pool, list(owned.held()), limit=10)
    return [Letter(row.shard_id, row.body, row.inbox_id) for row in rows]


async def lease(pool: Pool) -> list[Leased]:
    return await command.lease(pool, WORKER, pools=["cpu"], limit=10, lease_seconds=60)


def letter(leased: Leased, report: Done | Failed | Parked) -> Letter:
    claimed = Claimed(
        execution_id=leased.execution_id, command_id=leased.command_id, worker_id=WORKER
    )
    return Letter(leased.shard_id, encode_messages([claimed, report]))


async def event_types(pool: Pool) -> list[str]:
    rows = await pool.fetch("SELECT event_type FROM noetl.event ORDER BY event_id")
    return [row["event_type"] for row in rows]
