"""64-bit ids that sort by time: 41 bits of milliseconds, 10 of node, 12 of sequence.

Two processes never share a node number (it is leased in `noetl.runtime`), and a generator never
goes backwards: a clock that does is waited out by counting on from the last millisecond used.
"""

from collections.abc import Callable

EPOCH_MS = 1_704_067_200_000  # 2024-01-01T00:00:00Z
NODE_BITS = 10
SEQUENCE_BITS = 12
NODE_COUNT = 1 << NODE_BITS

_SEQUENCE_MASK = (1 << SEQUENCE_BITS) - 1
_TIME_SHIFT = NODE_BITS + SEQUENCE_BITS


class Snowflake:
    """Mints ids for one node. The clock comes in, in milliseconds since 1970."""

    def __init__(self, node: int, now_ms: Callable[[], int]) -> None:
        assert 0 <= node < NODE_COUNT, node
        self._node = node
        self._now_ms = now_ms
        self._last_ms = 0
        self._sequence = 0

    def mint(self) -> int:
        now = self._now_ms() - EPOCH_MS
        if now > self._last_ms:
            self._last_ms, self._sequence = now, 0
        else:
            self._sequence = (self._sequence + 1) & _SEQUENCE_MASK
            if self._sequence == 0:
                self._last_ms += 1
        return (self._last_ms << _TIME_SHIFT) | (self._node << SEQUENCE_BITS) | self._sequence

    def pass_over(self, floor: int) -> None:
        """Mint only above `floor` from now on: a shard's next owner must sort after the last."""
        floor_ms = floor >> _TIME_SHIFT
        if floor_ms >= self._last_ms:
            self._last_ms, self._sequence = floor_ms + 1, 0


def minted_at_ms(snowflake: int) -> int:
    """When an id was made, in milliseconds since 1970."""
    return (snowflake >> _TIME_SHIFT) + EPOCH_MS


def first_id_at(unix_ms: int) -> int:
    """The smallest id that can be made at that moment: the boundary of a partition."""
    return (unix_ms - EPOCH_MS) << _TIME_SHIFT
