"""A turn in the making: the letters it took, the rows it will commit, whom to wake afterwards."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from noetl_core.domain.ids import EpochId, ExecutionId, ShardId, WorkerId
from noetl_core.domain.sharding import shard_of
from noetl_core.store.batch import Batch, DeadLetterRow, OutgoingRow
from noetl_core.store.event import EventRow
from noetl_core.store.postgres import Connection
from noetl_core.wire.messages import (
    Barrier,
    Done,
    Failed,
    Message,
    decode_messages,
    encode_messages,
)


class Letter(NamedTuple):
    """A body that came in, by NATS or by the inbox."""

    shard_id: ShardId
    body: bytes
    inbox_id: int | None = None


class Taken(NamedTuple):
    """A message out of a letter."""

    shard_id: ShardId
    message: Message

    @property
    def execution_id(self) -> ExecutionId | None:
        return None if isinstance(self.message, Barrier) else self.message.execution_id


class Closing(NamedTuple):
    """The end of an epoch on a shard."""

    epoch: EpochId
    unmarked: set[ExecutionId]
    """Who moved in it and is marked by one that follows."""


class Turn:
    def __init__(self, conn: Connection, held: Mapping[ShardId, int], *, shard_count: int) -> None:
        self.conn = conn
        self.shard_count = shard_count
        self.held = dict(held)
        self.batch = Batch()
        self.touched: dict[ExecutionId, ShardId] = {}
        self.closing: dict[ShardId, Closing] = {}
        self.poisoned: dict[ExecutionId, str] = {}
        self.ended_on: set[ShardId] = set()
        """Shards on which an execution ended: somebody may be waiting for that."""
        self.work: Counter[tuple[ShardId, str]] = Counter()
        self.meant_for: Counter[tuple[ShardId, WorkerId]] = Counter()
        """Work that a certain worker is to hear of, not any worker of the pool."""
        self.nobody_able: set[tuple[str, frozenset[str]]] = set()
        """Pools in which no worker that we know has what a command requires."""
        self.unheeded: list[Done | Failed] = []
        """Ends of commands that were not open: said twice, or too late."""
        self.told: set[ShardId] = set()
        """Shards whose inbox has got something by this turn."""
        self.absorbed: list[EventRow] = []
        """Recorded by the turns that this one stands for."""

    def open(self, letters: list[Letter]) -> list[Taken]:
        """The messages of the shards we hold. A letter that cannot be read is parked."""
        return [t for letter in letters if letter.shard_id in self.held for t in self._open(letter)]

    def _open(self, letter: Letter) -> Iterator[Taken]:
        if letter.inbox_id is not None:
            self.fence(letter.shard_id)
            self.batch.inbox_ids.append(letter.inbox_id)
        try:
            for message in decode_messages(letter.body):
                shard = self._shard_of(message, letter)
                if shard in self.held:
                    yield Taken(shard, message)
                else:
                    self._pass_on(message, letter)
        except msgspec.DecodeError as error:
            self.fence(letter.shard_id)
            self.batch.dead_letters.append(
                DeadLetterRow(letter.shard_id, None, "broker", letter.body, str(error))
            )

    def _shard_of(self, message: Message, letter: Letter) -> ShardId:
        """Where it belongs by the count of now; it may have been sent by the count of before."""
        if isinstance(message, Barrier):
            return letter.shard_id
        return shard_of(message.execution_id, shard_count=self.shard_count)

    def _pass_on(self, message: Message, letter: Letter) -> None:
        """Into the inbox of its shard, in the commit that removes it from here."""
        assert not isinstance(message, Barrier), message
        self.fence(letter.shard_id)
        row = OutgoingRow(message.execution_id, encode_messages([message]))
        self.batch.outgoing.append(row)

    def fence(self, shard: ShardId) -> None:
        """This turn writes to the shard: its commit must prove that we hold it."""
        self.batch.fences[shard] = self.held[shard]

    def absorb(self, other: "Turn") -> None:
        """Another turn was committed for the same letters: settle and dispatch them as one."""
        self.touched.update(other.touched)
        self.closing.update(other.closing)
        self.work.update(other.work)
        self.meant_for.update(other.meant_for)
        self.nobody_able |= other.nobody_able
        self.ended_on |= other.ended_on
        self.told |= other.told
        self.absorbed += [*other.absorbed, *other.batch.events]
        self.poisoned.update(other.poisoned)
