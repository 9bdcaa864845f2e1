"""When a worker looks into the queue by itself."""

import asyncio
from typing import Any

import uvloop

from noetl_core.domain.ids import WorkerId
from noetl_worker.lease import Leaser
from noetl_worker.tool_slots import ToolSlots


def leaser() -> Leaser:
    nothing: Any = None
    return Leaser(
        nothing,
        nothing,
        worker_id=WorkerId("w"),
        pools=["cpu"],
        offers=(),
        tool_slots=ToolSlots({}),
        lease_seconds=60,
        poll_seconds=1,
        poll_away_seconds=0.05,
        work=nothing,
    )


async def _look_twice() -> bool:
    looking = leaser()
    looking._look_in(0.0)
    looking._look_in(60.0)
    async with asyncio.timeout(30):
        await looking.wake.wait()
    looking.wake.clear()
    looking._look_in(60.0)
    looking._look_in(0.01)
    async with asyncio.timeout(30):
        await looking.wake.wait()
    return looking.wake.is_set()


def test_the_nearer_look_is_taken_on_the_loop_that_services_run_on() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(_look_twice())
