"""What a projection remembers between turns: watermarks, and the states of executions that move.

It is an accelerator and nothing more. Whatever it holds is in the database too, and it is dropped
whenever the two may differ: the shard has another epoch, or a turn did not come to its end.
"""

from collections.abc import Iterable, Mapping

from noetl_core.domain.ids import EventId, ExecutionId, ShardId
from noetl_core.process.recent import Recent
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
        self._executions: Recent[ExecutionId, Projected] = Recent(
            count_max=executions_max, bytes_max=bytes_max
        )

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
        for execution_id, one in self.recall(list(self._executions)).items():
            if one.shard_id in gone:
                self._executions.forget(execution_id)

    def clear(self) -> None:
        self.epochs.clear()
        self.watermarks.clear()
        self.given_up.clear()
        self._executions.clear()
        self.behind = 0

    def recall(self, execution_ids: Iterable[ExecutionId]) -> dict[ExecutionId, Projected]:
        found = ((e, self._executions.get(e)) for e in execution_ids)
        return {e: one for e, one in found if one is not None}

    def remember(
        self, changed: Mapping[ExecutionId, Projected], reached: Mapping[ShardId, Reached]
    ) -> None:
        """Keep what moves and let go of what has ended; the longest untouched makes room."""
        self.watermarks.update({shard: to.event_id for shard, to in reached.items()})
        for execution_id, one in changed.items():
            if one.state.is_terminal:
                self._executions.forget(execution_id)
            else:
                self._executions.put(execution_id, one, size=one.state_bytes)
        self._executions.trim()
