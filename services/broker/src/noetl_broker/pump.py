"""Takes what came in, advances it until it is committed, wakes the others, acknowledges."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

import structlog

from noetl_broker.advance import Broker
from noetl_broker.dispatch import dispatch
from noetl_broker.intake import Intake
from noetl_broker.turn import Letter, Turn
from noetl_core.bus.connection import Bus
from noetl_core.bus.consume import Delivery
from noetl_core.domain.errors import ShardLostError
from noetl_core.domain.ids import ShardId
from noetl_core.process.complaint import Complaint
from noetl_core.process.resilience import backoff_seconds, is_transient
from noetl_core.store.event import EventRow

log = structlog.get_logger()


class Pump:
    def __init__(
        self,
        broker: Broker,
        intake: Intake,
        bus: Bus,
        *,
        held: Callable[[], Mapping[ShardId, int]],
        renew: Callable[[], Awaitable[object]],
        stopping: asyncio.Event,
        note: Callable[[list[EventRow]], None] | None = None,
    ) -> None:
        self._note = note
        self._broker = broker
        self._intake = intake
        self._bus = bus
        self._held = held
        self._renew = renew
        self._stopping = stopping
        self._complaint = Complaint()

    async def turn(self) -> bool:
        """One batch. True when there was one."""
        letters, deliveries = await self._intake.next_batch()
        if not letters:
            return False
        begun = time.perf_counter()
        turn = await self._until_committed(letters)
        self._intake.portion.learn(
            size=sum(len(letter.body) for letter in letters), seconds=time.perf_counter() - begun
        )
        if turn is not None:
            await dispatch(self._bus, turn)
            await _acknowledge(turn, deliveries)
            if self._note is not None:
                self._note([*turn.absorbed, *turn.batch.events])
        return True

    async def _until_committed(self, letters: list[Letter]) -> Turn | None:
        """Postgres may be away for a while: the letters wait here, unacknowledged.

        Always the same letters until they are committed: a commit whose answer was lost may have
        happened, and only doing it again tells. Other letters taken first would be decided from
        states that do not know of it.
        """
        is_unsure = False
        while not self._stopping.is_set():
            try:
                if is_unsure or not self._holds_all(letters):
                    # A lease that ran out while Postgres was away is ours again when it is renewed.
                    # Letters of a shard that we do not hold are dropped, for its owner to read.
                    await self._renew()
                turn = await self._broker.advance(letters)
            except ShardLostError as error:
                log.warning("broker.fenced", shard_ids=list(error.shard_ids))
            except Exception as error:
                if not is_transient(error):
                    raise
                await self._back_off(error)
            else:
                self._recover()
                return turn
            is_unsure = True
        return None

    def _holds_all(self, letters: list[Letter]) -> bool:
        return {letter.shard_id for letter in letters} <= self._held().keys()

    async def _back_off(self, error: Exception) -> None:
        if self._complaint.failed():
            failures = self._complaint.failures
            log.warning("broker.waiting", reason=str(error), failures=failures)
        await asyncio.sleep(backoff_seconds(self._complaint.failures))

    def _recover(self) -> None:
        if failures := self._complaint.recovered():
            log.info("broker.recovered", failures=failures)


async def _acknowledge(turn: Turn, deliveries: list[Delivery]) -> None:
    """The last of a shard stands for all before it. A lost shard is left to its new owner."""
    newest = {delivery.shard: delivery for delivery in deliveries if delivery.shard in turn.held}
    for delivery in newest.values():
        await delivery.ack()
