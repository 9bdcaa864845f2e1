"""Kinds of tools that run only so many at a time here, whatever the worker's slots are.

Kept twice. A command whose row says which of these tools it needs is not leased while none of their
slots is free: others may take it. And no call begins without a slot, also one of a command whose
row says nothing, because the broker did not know of the limit when it issued it.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext

from noetl_core.domain.workers import tool_offer
from noetl_core.process.config import ConfigError

VARIABLE = "NOETL_WORKER_TOOL_SLOTS"


class ToolSlots:
    def __init__(self, limits: Mapping[str, int]) -> None:
        self._kinds = dict(limits)
        self._limits = {tool_offer(kind): limit for kind, limit in limits.items()}
        self._gates = {kind: asyncio.Semaphore(limit) for kind, limit in limits.items()}
        self._taken: Counter[str] = Counter()

    def take(self, requires: Iterable[str] | None) -> None:
        """A command that was leased needs these until it has ended."""
        self._taken.update(offer for offer in requires or () if offer in self._limits)

    def give_back(self, requires: Iterable[str] | None) -> None:
        self._taken.subtract(offer for offer in requires or () if offer in self._limits)

    def full(self) -> frozenset[str]:
        """What this worker has and cannot offer now."""
        return frozenset(o for o, limit in self._limits.items() if self._taken[o] >= limit)

    def most_at_once(self) -> int | None:
        """Of any commands so many can be leased without taking a slot that is not there."""
        free = (limit - self._taken[offer] for offer, limit in self._limits.items())
        return min((count for count in free if count > 0), default=None)

    def standing(self) -> dict[str, dict[str, int]]:
        """How many slots each of these kinds has, and how many are free."""
        return {
            kind: {"slots": limit, "free": max(0, limit - self._taken[tool_offer(kind)])}
            for kind, limit in self._kinds.items()
        }

    def gate(self, kind: str) -> AbstractAsyncContextManager[None]:
        return self._gates.get(kind) or nullcontext()


def read_tool_slots(given: Collection[str], kinds: Collection[str]) -> dict[str, int]:
    """`("python=2", "http=50")`. Raises ConfigError."""
    slots: dict[str, int] = {}
    for pair in given:
        kind, _, count = (part.strip() for part in pair.partition("="))
        if kind not in kinds:
            known = ", ".join(sorted(kinds))
            raise ConfigError(f"{VARIABLE}: no tool of kind {kind!r} here; there are: {known}")
        if not count.isdigit() or int(count) == 0:
            raise ConfigError(f"{VARIABLE}: {pair!r} is not such as python=2")
        slots[kind] = int(count)
    return slots
