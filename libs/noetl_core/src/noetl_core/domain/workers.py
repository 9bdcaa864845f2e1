"""The workers that are known to live, and what they offer.

An offer is a short text: `gpu=true` for a label, `tool:acme.mailer` for a tool. A command lists
what it requires in the same words, and the queue compares the two.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import NamedTuple

from noetl_core.domain.ids import WorkerId

POOL_LABEL = "pool"
"""Of a worker in `noetl.runtime`: the pools that it serves, with commas between them."""

TOOL_SLOTS_LABEL = "tool_slots"
"""And `python=2,http=50`: how many of which tool it runs at a time."""

POOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
LABEL_NAME = re.compile(r"[A-Za-z0-9_./-]{1,64}")
LABEL_VALUE = re.compile(r"[^\s,=][^,=\n]{0,127}")


class LiveWorker(NamedTuple):
    worker_id: WorkerId
    pools: frozenset[str]
    offers: frozenset[str]
    capacity: int = 1
    limited: frozenset[str] = frozenset()
    """Kinds of tools that it runs only so many of at a time."""


class Workers:
    """What the broker knew when it last looked."""

    def __init__(self, workers: Iterable[LiveWorker] = ()) -> None:
        self._workers = tuple(workers)

    @cached_property
    def limited(self) -> frozenset[str]:
        """Kinds of tools that some worker limits."""
        return frozenset().union(*(worker.limited for worker in self._workers))

    @cached_property
    def _names(self) -> frozenset[WorkerId]:
        return frozenset(worker.worker_id for worker in self._workers)

    def has(self, worker_id: WorkerId) -> bool:
        return worker_id in self._names

    def is_gone(self, worker_id: WorkerId) -> bool:
        """Others live, and this one does not: it said goodbye, or fell silent. Where we know of
        nobody, we have not looked yet."""
        return bool(self._names) and worker_id not in self._names

    def able(self, pool: str, requires: frozenset[str]) -> list[LiveWorker]:
        """Who serves the pool and has everything that is required."""
        return [w for w in self._workers if pool in w.pools and requires <= w.offers]


NOBODY = Workers()
_TOOL = "tool:"


def label_offer(name: str, value: str) -> str:
    return f"{name}={value}"


def tool_offer(kind: str) -> str:
    """No label has a colon in its name."""
    return f"{_TOOL}{kind}"


def tool_of(offer: str) -> str | None:
    """Which tool it is about; None for a label."""
    return offer.removeprefix(_TOOL) if offer.startswith(_TOOL) else None


def offers_of(labels: Mapping[str, str], kinds: Iterable[str]) -> frozenset[str]:
    of_labels = {label_offer(name, value) for name, value in labels.items()}
    return frozenset(of_labels | {tool_offer(kind) for kind in kinds})
