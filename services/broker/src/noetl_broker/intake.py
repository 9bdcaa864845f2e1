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
        inbox_poll_seconds: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._deliveries = deliveries
        self._held = held
        self._batch_size = batch_size
        self._inbox_poll_seconds = inbox_poll_seconds
        self._inbox_due = asyncio.Event()
        self._inbox_due.set()
        self._looked_at = 0.0
        self._taken: list[Delivery] = []
        """Off the queue and in no batch yet: a look into the inbox that fails must not lose them,
        because the acknowledgement of a later one would stand for them, too."""
        self._barriers: dict[ShardId, bytes] = {}
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
        if not self._taken:
            await self._arrival()
        self._fill()
        waiting = await self._inbox_letters() if self._is_inbox_due() else []
        deliveries, self._taken = self._taken, []
        letters = [Letter(delivery.shard, delivery.body) for delivery in deliveries]
        letters += waiting
        # Every broker hears of every shard.
        held = self._held()
        letters += [Letter(shard, body) for shard, body in self._barriers.items() if shard in held]
        self._barriers.clear()
        return letters, deliveries

    def _fill(self) -> None:
        size = sum(len(delivery.body) for delivery in self._taken)
        while not (
            len(self._taken) >= self._batch_size
            or size >= self.portion.bytes_max
            or self._deliveries.empty()
        ):
            self._taken.append(self._deliveries.get_nowait())
            size += len(self._taken[-1].body)

    def _is_inbox_due(self) -> bool:
        """Also without a call, however much comes by NATS: a call may be lost."""
        return self._inbox_due.is_set() or _now() - self._looked_at >= self._inbox_poll_seconds()

    async def _inbox_letters(self) -> list[Letter]:
        self._inbox_due.clear()
        try:
            rows = await inbox.waiting(
                self._pool,
                list(self._held()),
                limit=self._batch_size,
                bytes_max=self.portion.bytes_max,
            )
        except BaseException:
            self._inbox_due.set()
            raise
        self._looked_at = _now()
        is_cut = sum(len(row.body) for row in rows) >= self.portion.bytes_max
        if is_cut or len(rows) == self._batch_size:
            self._inbox_due.set()
        return [Letter(row.shard_id, row.body, row.inbox_id) for row in rows]

    async def _arrival(self) -> None:
        """Wait for the first delivery, or until the inbox is due."""
        if not self._deliveries.empty() or self._inbox_due.is_set():
            return
        first = asyncio.ensure_future(self._deliveries.get())
        due = asyncio.ensure_future(self._inbox_due.wait())
        try:
            await asyncio.wait(
                {first, due},
                timeout=self._inbox_poll_seconds(),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            if first.done():
                self._taken.append(first.result())
            due.cancel()
            first.cancel()


def _now() -> float:
    return asyncio.get_running_loop().time()
