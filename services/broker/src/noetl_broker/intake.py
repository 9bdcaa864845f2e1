"""What comes in: letters from JetStream and from the inbox, as one batch a turn.

No artificial wait: a batch is whatever arrived while the last commit was under way.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from noetl_broker.portion import Portion
from noetl_broker.turn import Letter
from noetl_core.bus.consume import Delivery
from noetl_core.domain.ids import ShardId
from noetl_core.store import inbox
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Barrier, decode_messages, encode_messages


class Intake:
    def __init__(
        self,
        pool: Pool,
        deliveries: asyncio.Queue[Delivery],
        *,
        held: Callable[[], Mapping[ShardId, int]],
        batch_size: int,
        inbox_poll_seconds: float,
    ) -> None:
        self._pool = pool
        self._deliveries = deliveries
        self._held = held
        self._batch_size = batch_size
        self._inbox_poll_seconds = inbox_poll_seconds
        self._inbox_due = asyncio.Event()
        self._inbox_due.set()
        self._barriers: dict[ShardId, bytes] = {}
        self._arrived: list[Delivery] = []
        """The delivery that ended the wait, until it goes into a batch."""
        self.portion = Portion()

    async def look_into_inbox(self, _body: bytes = b"") -> None:
        """Somebody says that there is something: read it with the next batch."""
        self._inbox_due.set()

    async def close_epochs(self, body: bytes) -> None:
        """Barriers go with the next batch, past everything that waits: an epoch that is closed
        only when a backlog is done says nothing of now.
        """
        with suppress(msgspec.DecodeError):
            for one in decode_messages(body):
                if isinstance(one, Barrier):
                    self._barriers[one.shard_id] = encode_messages([one])
            self._inbox_due.set()

    async def next_batch(self) -> tuple[list[Letter], list[Delivery]]:
        """Waits until there is something, or until the inbox is due; may come back empty."""
        await self._arrival()
        # Before anything is taken: while Postgres is away this fails, and what had left the queue
        # would be acknowledged with the next delivery, though nobody has seen it.
        rows = await self._inbox_letters() if self._inbox_due.is_set() else []
        deliveries, self._arrived = self._arrived, []
        size = sum(len(delivery.body) for delivery in deliveries)
        while not (
            len(deliveries) >= self._batch_size
            or size >= self.portion.bytes_max
            or self._deliveries.empty()
        ):
            deliveries.append(self._deliveries.get_nowait())
            size += len(deliveries[-1].body)
        letters = [Letter(delivery.shard, delivery.body) for delivery in deliveries]
        letters += rows
        letters += [Letter(shard, body) for shard, body in self._barriers.items()]
        self._barriers.clear()
        return letters, deliveries

    async def _inbox_letters(self) -> list[Letter]:
        rows = await inbox.waiting(self._pool, list(self._held()), limit=self._batch_size)
        if len(rows) < self._batch_size:
            self._inbox_due.clear()
        return [Letter(row.shard_id, row.body, row.inbox_id) for row in rows]

    async def _arrival(self) -> None:
        """Wait until there is something to take, or the inbox is due."""
        if self._arrived or not self._deliveries.empty() or self._inbox_due.is_set():
            return
        first = asyncio.ensure_future(self._deliveries.get())
        due = asyncio.ensure_future(self._inbox_due.wait())
        try:
            await asyncio.wait(
                {first, due}, timeout=self._inbox_poll_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if first.done():
                self._arrived.append(first.result())
            else:
                self._inbox_due.set()
        finally:
            due.cancel()
            first.cancel()
