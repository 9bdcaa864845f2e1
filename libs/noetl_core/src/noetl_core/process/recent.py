"""What was used last, as much of it as fits: a cache that knows how large its values are."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class _Kept(NamedTuple, Generic[V]):
    value: V
    size: int


class Recent(Generic[K, V]):
    """Nothing is let go of before `trim`: whoever works with the values says when."""

    def __init__(self, *, count_max: int, bytes_max: int) -> None:
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._kept: OrderedDict[K, _Kept[V]] = OrderedDict()

    def __contains__(self, key: K) -> bool:
        return key in self._kept

    def __iter__(self) -> Iterator[K]:
        return iter(self._kept)

    def get(self, key: K) -> V | None:
        kept = self._kept.get(key)
        return None if kept is None else kept.value

    def put(self, key: K, value: V, *, size: int = 0) -> None:
        """It is the one that was used last, and so large from now on."""
        self.forget(key)
        self._kept[key] = _Kept(value, size)
        self._bytes += size

    def forget(self, key: K) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._bytes -= kept.size

    def clear(self) -> None:
        self._kept.clear()
        self._bytes = 0

    def trim(self) -> None:
        """The longest untouched makes room. The last one stays, however large: to read it anew each
        time would take as much memory."""
        while len(self._kept) > 1 and self._is_full():
            self.forget(next(iter(self._kept)))

    def _is_full(self) -> bool:
        return len(self._kept) > self._count_max or self._bytes > self._bytes_max
