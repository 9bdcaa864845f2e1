"""The arc graph of a playbook: what lies ahead of a step, and where branches meet again.

Back edges (arcs into a step that is still open in a depth-first walk from the entry) are the loops
users draw with arcs. Whether a token there can still come here is asked for this turn of every loop
that "here" is part of: an arc back leads to the next turn and is not counted. A loop beside it is
gone round as often as its token likes, so there the arc back counts, or a barrier behind the loop
would not wait for who is in its body.

Two barriers never wait for each other. If they did, the steps on the way there and back again would
be a cycle; the first of them in the walk is the head of a loop that has all of them in it, so the
arc back into it would not have been counted for any of them.
"""

from collections.abc import Callable, Iterable, Iterator

from noetl_core.domain.ids import StepName
from noetl_core.domain.playbook import Playbook, per_playbook

Edge = tuple[StepName, StepName]


class Graph:
    """Made once per playbook, by `graph_of`. Who reaches a step is worked out when first asked."""

    def __init__(self, playbook: Playbook) -> None:
        walk = _Walk(playbook)
        self.back_edges: frozenset[Edge] = frozenset(walk.back_edges)
        self.incoming: dict[StepName, tuple[StepName, ...]] = _incoming(playbook, self.back_edges)
        self.reachable: frozenset[StepName] = frozenset(walk.from_entry)
        self._sources = _sources(playbook)
        self._loops = {head: self._loop(head) for head in {target for _, target in walk.back_edges}}
        self._behind: dict[StepName, frozenset[StepName]] = {}
        fed = _fed_by_chunks(playbook)
        self._barriers = frozenset(
            name
            for name, step in playbook.steps.items()
            if _joins(step.spec.join, self.incoming[name], is_fed_by_chunks=name in fed)
        )

    def reaches(self, source: StepName, target: StepName) -> bool:
        """Whether a token at `source` can come to `target` in this turn of the loops around it."""
        if target not in self._behind:
            self._behind[target] = self._who_reaches(target)
        return source in self._behind[target]

    def is_barrier(self, step: StepName) -> bool:
        """Whether arriving tokens wait here for all others that may still come."""
        return step in self._barriers

    def _loop(self, head: StepName) -> frozenset[StepName]:
        """All steps from which an arc back to `head` can be reached without passing it."""
        ends = (source for source, target in self.back_edges if target == head)
        return _walk_back(self._sources, ends, lambda _, target: target != head) | {head}

    def _who_reaches(self, step: StepName) -> frozenset[StepName]:
        around = {head for head, loop in self._loops.items() if step in loop}

        def counts(source: StepName, target: StepName) -> bool:
            return target not in around or (source, target) not in self.back_edges

        starts = (source for source in self._sources[step] if counts(source, step))
        return _walk_back(self._sources, starts, counts)


@per_playbook
def graph_of(playbook: Playbook) -> Graph:
    return Graph(playbook)


class _Walk:
    """Depth first in the order of the document, not recursive: a chain may have thousands."""

    def __init__(self, playbook: Playbook) -> None:
        self.back_edges: set[Edge] = set()
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


def _sources(playbook: Playbook) -> dict[StepName, list[StepName]]:
    """Where the arcs into each step come from, those that lead back too."""
    sources: dict[StepName, list[StepName]] = {name: [] for name in playbook.steps}
    for name in playbook.steps:
        for target in _targets(playbook, name):
            sources[target].append(name)
    return sources


def _walk_back(
    sources: dict[StepName, list[StepName]],
    starts: Iterable[StepName],
    counts: Callable[[StepName, StepName], bool],
) -> frozenset[StepName]:
    """The starts, and every step from which arcs that count lead to one of them."""
    found = set(starts)
    waiting = list(found)
    while waiting:
        target = waiting.pop()
        for source in sources[target]:
            if source not in found and counts(source, target):
                found.add(source)
                waiting.append(source)
    return frozenset(found)


def _fed_by_chunks(playbook: Playbook) -> set[StepName]:
    arcs = (arc for step in playbook.steps.values() for arc in step.next.arcs)
    return {arc.step for arc in arcs if arc.on is not None}


def _joins(join: str | None, sources: tuple[StepName, ...], *, is_fed_by_chunks: bool) -> bool:
    """A step that takes chunks runs for each of them, unless it says that it waits for all."""
    return join == "all" or (join is None and len(sources) > 1 and not is_fed_by_chunks)
