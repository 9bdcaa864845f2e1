"""What a projection remembers between turns: watermarks, and the states of executions that move.

It is an accelerator and nothing more. Whatever it holds is in the database too, and it is dropped
whenever the two may differ: the shard has another epoch, or a turn did not come to its end.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from noetl_core.domain.ids import EventId, ExecutionId, ShardId
from noetl_core.store.execution_projection import Projected, Reached

BYTES_MAX = 32 * 1024 * 1024
"""Of the states as JSON. Decoded they take up to seven times as much."""


class Memory:
    def __init__(self, *, executions_max: int, bytes_max: int = BYTES_MAX) -> None:
        self.epochs: dict[ShardId, int] = {}
        self.watermarks: dict[ShardId, EventId] = {}
        self.boundary: EventId | None = None
        """Where the shard count changed: nothing past it is read until all shards are there."""
        self.behind = 0
        """How many shards had more to read than the last turn took: 0 when it took all."""
        self.ended: list[ExecutionId] = []
        """Executions that the last turn showed as ended."""
        self.ended_rows: list[Projected] = []
        """And what it showed of them."""
        self.has_closed = False
        """Whether the last turn passed the close of an epoch."""
        self.given_up: dict[ExecutionId, ShardId] = {}
        """Executions whose row could not be read nor made anew: they are passed over for as long as
        their shard is ours, so that a long log is not read again by every turn."""
        self._executions_max = executions_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._executions: OrderedDict[ExecutionId, _Kept] = OrderedDict()

    def keep(self, owned: Mapping[ShardId, int]) -> None:
        """Forget every shard that is not owned under the epoch it was read under."""
        self.drop([shard for shard, epoch in self.epochs.items() if owned.get(shard) != epoch])
        self.epochs = dict(owned)
        self.behind = min(self.behind, len(self.epochs))

    def drop(self, shards: Iterable[ShardId]) -> None:
        gone = set(shards)
        if not gone:
            return
        for shard in gone:
            self.epochs.pop(shard, None)
            self.watermarks.pop(shard, None)
        self.given_up = {e: shard for e, shard in self.given_up.items() if shard not in gone}
        kept = self._executions.items()
        for execution_id in [e for e, (one, _) in kept if one.shard_id in gone]:
            self._forget(execution_id)

    def clear(self) -> None:
        self.epochs.clear()
        self.watermarks.clear()
        self.given_up.clear()
        self._executions.clear()
        self._bytes = 0
        self.behind = 0

    def recall(self, execution_ids: Iterable[ExecutionId]) -> dict[ExecutionId, Projected]:
        return {e: self._executions[e].row for e in execution_ids if e in self._executions}

    def remember(
        self, changed: Mapping[ExecutionId, Projected], reached: Mapping[ShardId, Reached]
    ) -> None:
        """Keep what moves and let go of what has ended; the longest untouched makes room. The last
        one stays, however large: to read it anew in every turn would take as much memory."""
        self.watermarks.update({shard: to.event_id for shard, to in reached.items()})
        for execution_id, one in changed.items():
            self._forget(execution_id)
            if not one.state.is_terminal:
                self._executions[execution_id] = _Kept(one, one.state_bytes)
                self._bytes += one.state_bytes
        while self._is_full() and len(self._executions) > 1:
            self._forget(next(iter(self._executions)))

    def _is_full(self) -> bool:
        return len(self._executions) > self._executions_max or self._bytes > self._bytes_max

    def _forget(self, execution_id: ExecutionId) -> None:
        kept = self._executions.pop(execution_id, None)
        if kept is not None:
            self._bytes -= kept.bytes


class _Kept(NamedTuple):
    """A row, and what it was counted as: by now it may have grown."""

    row: Projected
    bytes: int
