"""Letters are kept until it is known whose they are."""

import asyncio
from collections.abc import Mapping

import pytest

from noetl_broker.intake import Intake
from noetl_broker.pump import Pump
from noetl_core.bus.connection import Bus
from noetl_core.bus.consume import Delivery
from noetl_core.domain.ids import ShardId
from noetl_core.store.postgres import Pool
from services.broker.desk import Desk, done, letter_of
from services.broker.test_advance import CHAIN


class Lapsed:
    """A desk whose leases have run out by its own clock, until it has asked Postgres."""

    def __init__(self, desk: Desk, bus: Bus) -> None:
        self.claims: Mapping[ShardId, int] = {}
        self.failures = 0
        self._desk = desk
        desk.broker._held = self.held
        self.queue: asyncio.Queue[Delivery] = asyncio.Queue()
        intake = Intake(
            desk.pool, self.queue, held=self.held, batch_size=10, inbox_poll_seconds=0.05
        )
        self.pump = Pump(
            desk.broker, intake, bus, held=self.held, renew=self._renew, stopping=asyncio.Event()
        )

    def held(self) -> Mapping[ShardId, int]:
        return self.claims

    async def _renew(self) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("away")
        self.claims = self._desk.claims


@pytest.mark.parametrize("failures", [0, 2])
async def test_letters_wait_until_a_lapsed_lease_is_renewed(
    pool: Pool, bus: Bus, failures: int
) -> None:
    desk = Desk(pool)
    await desk.claim()
    execution_id = await desk.start(CHAIN)
    (leased,) = await desk.lease()
    lapsed = Lapsed(desk, bus)
    lapsed.failures = failures
    report = letter_of(done(execution_id, leased.command_id, {"go": False}))
    lapsed.queue.put_nowait(Delivery(report.shard_id, report.body, bus, "nobody"))

    await lapsed.pump.turn()

    assert "execution.completed" in await desk.types(execution_id)
