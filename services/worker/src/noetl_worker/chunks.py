"""The chunks of a streamed result: each is stored and handed to the broker before the next is made.

    tool ── emit(document) ──> stored ──> noetl.inbox ──> the tool goes on
                                              └─> broker: call.partial, a token for each chunk

So one chunk is in memory at a time, and chunks arrive in their order: a row of the inbox that was
committed earlier is read earlier, and the end of the command takes the same road.

Crash analysis. We die
- before a chunk is in the inbox: nobody has heard of it. What was stored of it lies under the name
  of the command and goes with its execution.
- between two chunks: the broker has recorded some and knows how many. The next attempt is told
  (`brief.chunks`) and begins again at the first; what is there already is counted and dropped here.
- after a chunk is in the inbox, and the attempt is given up before the broker reads it: the broker
  drops it, because the command is no longer open, and the next attempt sends it again.
- after the last chunk, before the end is said: the next attempt sends none and says the end.
The end names the number of chunks, and the broker does not take it before it has them all.

All this counts on a tool that gives the same chunks in the same order again: a query without ORDER
BY may not. The same holds for a task that its own rules try again: it is one call, and what its
first attempt has sent is not sent twice.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from noetl_core.domain.ids import ShardId
from noetl_core.wire.messages import Partial, encode_messages
from noetl_worker.patience import patiently

Store = Callable[[Any, int], Awaitable[Partial]]
"""Makes the message about chunk number n of the command. Raises ToolFailedError."""

Send = Callable[[ShardId, bytes], Awaitable[None]]
"""Brings a batch of messages to the broker for certain; sending it twice is as good as once."""


class Chunks:
    """Those of one command."""

    def __init__(self, store: Store, send: Send, shard_id: ShardId, *, recorded: int) -> None:
        self._store = store
        self._send = send
        self._shard_id = shard_id
        self._first = 0
        self._next = 0
        self.sent = recorded
        """How many are out, with those that earlier attempts of the command have sent."""

    def begin(self, attempt: int) -> int:
        """A call of a tool begins; says how many of its chunks are out already.

        Another attempt at the same task makes the same chunks. A task that is called anew, such as
        one that was jumped to, makes more.
        """
        if attempt == 1:
            self._first = self._next
        self._next = self._first
        return max(0, self.sent - self._first)

    async def emit(self, document: Any) -> None:
        index = self._next
        self._next += 1
        if index < self.sent:
            return
        message = await self._store(document, index)
        body = encode_messages([message])
        await patiently(lambda: self._send(self._shard_id, body))
        self.sent = index + 1
