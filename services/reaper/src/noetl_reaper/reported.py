"""What was reported lately: saying it again before the broker could act would only be noise."""

import time
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

FOUND_MAX = 20_000
"""Of one kind, at one look, each shard an equal share of them: a shard whose broker does not act
fills its own. What is more waits until something before it is dealt with."""


class Reported(Generic[K]):
    """Memory only: after a restart everything is said once more, which is harmless.

    Nothing is remembered that was not found again, so there is never more in here than one look
    finds, and what the broker has dealt with makes room at once.
    """

    def __init__(
        self, *, repeat_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._repeat_seconds = repeat_seconds
        self._clock = clock
        self._said_at: dict[K, float] = {}

    def unsaid(self, found: Collection[K]) -> list[K]:
        """Those of all that a look has found that may be said now, in their order."""
        deadline = self._clock() - self._repeat_seconds
        said = ((key, self._said_at.get(key)) for key in found)
        self._said_at = {key: at for key, at in said if at is not None and at > deadline}
        return [key for key in found if key not in self._said_at]

    def add(self, keys: Iterable[K]) -> None:
        self._said_at.update(dict.fromkeys(keys, self._clock()))
