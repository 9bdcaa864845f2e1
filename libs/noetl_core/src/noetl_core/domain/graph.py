"""The arc graph of a playbook: what lies ahead of a step, and where branches meet again.

Back edges (arcs into a step that is still open in a depth-first walk from the entry) are the loops
users draw with arcs. They are left out of everything here: without them the graph has no cycle, so
"can a token there still come here" has an answer, and a loop never keeps a barrier waiting.
"""

from collections.abc import Iterator

from noetl_core.domain.ids import StepName
from noetl_core.domain.playbook import Playbook, per_playbook

Edge = tuple[StepName, StepName]


class Graph:
    """Made once per playbook, by `graph_of`. Reachability is a bitset a step: one `&` to ask."""

    def __init__(self, playbook: Playbook) -> None:
        walk = _Walk(playbook)
        self.back_edges: frozenset[Edge] = frozenset(walk.back_edges)
        self.incoming: dict[StepName, tuple[StepName, ...]] = _incoming(playbook, self.back_edges)
        self.reachable: frozenset[StepName] = frozenset(walk.from_entry)
        self._bit = {name: 1 << number for number, name in enumerate(playbook.steps)}
        self._ahead = _closure(playbook, walk.finished, self.back_edges, self._bit)
        fed = _fed_by_chunks(playbook)
        self._barriers = frozenset(
            name
            for name, step in playbook.steps.items()
            if _joins(step.spec.join, self.incoming[name], is_fed_by_chunks=name in fed)
        )

    def reaches(self, source: StepName, target: StepName) -> bool:
        """Whether at least one forward arc leads from `source` on to `target`."""
        return bool(self._ahead[source] & self._bit[target])

    def is_barrier(self, step: StepName) -> bool:
        """Whether arriving tokens wait here for all others that may still come."""
        return step in self._barriers


@per_playbook
def graph_of(playbook: Playbook) -> Graph:
    return Graph(playbook)


class _Walk:
    """Depth first in the order of the document, not recursive: a chain may have thousands."""

    def __init__(self, playbook: Playbook) -> None:
        self.back_edges: set[Edge] = set()
        self.finished: list[StepName] = []
        self._playbook = playbook
        self._open: set[StepName] = set()
        self._seen: set[StepName] = set()
        self._visit(playbook.entry_step)
        self.from_entry = set(self._seen)
        for name in playbook.steps:
            self._visit(name)

    def _visit(self, root: StepName) -> None:
        if root in self._seen:
            return
        stack: list[tuple[StepName, Iterator[StepName]]] = [self._enter(root)]
        while stack:
            name, targets = stack[-1]
            target = next(targets, None)
            if target is None:
                stack.pop()
                self._open.discard(name)
                self.finished.append(name)
            elif target in self._open:
                self.back_edges.add((name, target))
            elif target not in self._seen:
                stack.append(self._enter(target))

    def _enter(self, name: StepName) -> tuple[StepName, Iterator[StepName]]:
        self._seen.add(name)
        self._open.add(name)
        return name, _targets(self._playbook, name)


def _targets(playbook: Playbook, name: StepName) -> Iterator[StepName]:
    return (arc.step for arc in playbook.steps[name].next.arcs if arc.step in playbook.steps)


def _incoming(playbook: Playbook, back: frozenset[Edge]) -> dict[StepName, tuple[StepName, ...]]:
    sources: dict[StepName, list[StepName]] = {name: [] for name in playbook.steps}
    for name in playbook.steps:
        for target in _targets(playbook, name):
            if (name, target) not in back:
                sources[target].append(name)
    return {name: tuple(found) for name, found in sources.items()}


def _closure(
    playbook: Playbook,
    finished: list[StepName],
    back: frozenset[Edge],
    bit: dict[StepName, int],
) -> dict[StepName, int]:
    """Steps finish after everything ahead of them, so one pass in that order is enough."""
    ahead: dict[StepName, int] = {}
    for name in finished:
        bits = 0
        for target in _targets(playbook, name):
            if (name, target) not in back:
                bits |= bit[target] | ahead[target]
        ahead[name] = bits
    return ahead


def _fed_by_chunks(playbook: Playbook) -> set[StepName]:
    arcs = (arc for step in playbook.steps.values() for arc in step.next.arcs)
    return {arc.step for arc in arcs if arc.on is not None}


def _joins(join: str | None, sources: tuple[StepName, ...], *, is_fed_by_chunks: bool) -> bool:
    """A step that takes chunks runs for each of them, unless it says that it waits for all."""
    return join == "all" or (join is None and len(sources) > 1 and not is_fed_by_chunks)
