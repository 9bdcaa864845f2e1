"""What becomes of letters when Postgres goes away, or a lease does, before they are committed."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from noetl_broker.intake import Intake
from noetl_broker.pump import Pump
from noetl_core.bus.connection import Bus
from noetl_core.bus.consume import Delivery
from noetl_core.domain.ids import ExecutionId, ShardId
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Start, encode_messages
from services.broker.desk import Desk, letter_of

STEP = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: t}
workflow:
  - step: one
    tool: {kind: noop}
"""


class Scene:
    """A pump whose lease runs out and whose Postgres fails when the test says so."""

    def __init__(self, desk: Desk, bus: Bus) -> None:
        self.desk = desk
        self.is_lapsed = False
        self.failures: list[Exception] = []
        self.renewal_failures: list[Exception] = []
        self.renewals = 0
        self._advance = desk.broker.advance
        desk.broker._held = self.held
        desk.broker.advance = self.advance  # type: ignore[method-assign]
        self.queue: asyncio.Queue[Delivery] = asyncio.Queue()
        intake = Intake(
            desk.pool,
            self.queue,
            held=self.held,
            batch_size=10,
            inbox_poll_seconds=lambda: 0.05,
        )
        self.bus = bus
        self.pump = Pump(
            desk.broker, intake, bus, held=self.held, renew=self.renew, stopping=asyncio.Event()
        )

    def held(self) -> Mapping[ShardId, int]:
        return {} if self.is_lapsed else self.desk.claims

    async def renew(self) -> None:
        self.renewals += 1
        if self.renewal_failures:
            raise self.renewal_failures.pop()
        self.is_lapsed = False

    async def advance(self, letters: Any) -> Any:
        if self.failures:
            raise self.failures.pop()
        return await self._advance(letters)

    async def deliver_start(self) -> ExecutionId:
        execution_id = ExecutionId(self.desk.mint())
        start = Start(
            execution_id=execution_id,
            catalog_id=await self.desk.register(STEP),
            path="p",
            version=1,
        )
        letter = letter_of(start)
        self.queue.put_nowait(Delivery(letter.shard_id, encode_messages([start]), self.bus, ""))
        return execution_id


@pytest.fixture
async def scene(pool: Pool, bus: Bus) -> Scene:
    desk = Desk(pool)
    await desk.claim()
    return Scene(desk, bus)


async def test_letters_whose_lease_ran_out_while_postgres_was_away_are_recorded_all_the_same(
    scene: Scene,
) -> None:
    execution_id = await scene.deliver_start()
    scene.is_lapsed = True

    await scene.pump.turn()

    assert "execution.started" in await scene.desk.types(execution_id)


async def test_letters_outlive_a_renewal_that_fails(scene: Scene) -> None:
    execution_id = await scene.deliver_start()
    scene.failures = [ConnectionRefusedError("away")]
    scene.renewal_failures = [ConnectionRefusedError("still away")]

    await scene.pump.turn()

    assert scene.renewals == 2
    assert "execution.started" in await scene.desk.types(execution_id)


async def test_no_lease_is_looked_at_while_all_goes_well(scene: Scene) -> None:
    await scene.deliver_start()

    await scene.pump.turn()

    assert scene.renewals == 0
