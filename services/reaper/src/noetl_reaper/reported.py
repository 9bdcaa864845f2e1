"""What was reported lately: saying it again before the broker could act would only be noise."""

import time
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

REMEMBERED_MAX = 20_000
"""What is more than this waits until some of it may be said again, or is dealt with: said and not
remembered, it would be said once more at the next look, and at each one after that."""


class Reported(Generic[K]):
    """Memory only: after a restart everything is said once more, which is harmless."""

    def __init__(
        self, *, repeat_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._repeat_seconds = repeat_seconds
        self._clock = clock
        self._said_at: dict[K, float] = {}

    def recent(self) -> list[K]:
        """What must not be said again yet."""
        deadline = self._clock() - self._repeat_seconds
        self._said_at = {key: at for key, at in self._said_at.items() if at > deadline}
        return list(self._said_at)

    def room(self) -> int:
        """How many more can be said and remembered now."""
        return REMEMBERED_MAX - len(self.recent())

    def add(self, keys: Iterable[K]) -> None:
        now = self._clock()
        self._said_at.update(dict.fromkeys(keys, now))
        assert len(self._said_at) <= REMEMBERED_MAX, len(self._said_at)
