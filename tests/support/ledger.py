"""The log of one execution, and the rules that every log keeps: checked as each fact is recorded.

Nothing here asks the domain what is right, but for `fold`: the rules are written down a second
time, from the language's description, in the simplest way that is right for a few steps.
"""

from collections import Counter

import msgspec

from noetl_core.domain.events import (
    AnyFact,
    CallDone,
    CallFailed,
    CommandExpired,
    CommandIssued,
    Event,
    ExecutionCancelled,
    ExecutionCompleted,
    ExecutionFailed,
    LoopDone,
    LoopStarted,
    StepEntered,
    StepExited,
    StepFailed,
)
from noetl_core.domain.fold import fold
from noetl_core.domain.ids import ExecutionId, LoopId, StepName
from noetl_core.domain.playbook import Playbook, per_playbook
from noetl_core.domain.state import ExecutionState

ATTEMPTS_MAX = 5

OfCommand = CommandIssued | CallDone | CallFailed | CommandExpired
Left = StepExited | StepFailed

_ENDS = (ExecutionCompleted, ExecutionFailed, ExecutionCancelled)

encode_state = msgspec.json.Encoder(order="deterministic").encode
"""The same bytes for states that differ in the order of their keys only."""


class Ledger:
    def __init__(self, execution_id: ExecutionId, roads: "Roads") -> None:
        self.events: list[Event] = []
        self.keys: set[str] = set()
        self.state = ExecutionState(execution_id=execution_id)
        """fold(all): what every other copy of the state is held against."""
        self.lost_for_good = False
        """Whether a command ran out of attempts: then the execution may end otherwise."""
        self._roads = roads
        self._ended: set[tuple[str, int, int | None]] = set()
        self._loops: dict[LoopId, Counter[str]] = {}

    def record(self, event: Event, key: str) -> None:
        assert not self.state.is_terminal, f"{event} after the end"
        assert key not in self.keys, f"{key} twice"
        self._check(event, event.fact)
        self.keys.add(key)
        self.events.append(event)
        fold(self.state, event)
        self._check_loops()

    def _check(self, event: Event, fact: AnyFact) -> None:
        match fact:
            case LoopStarted():
                self._loops[LoopId(event.event_id)] = Counter()
            case CommandIssued():
                self._check_issued(fact)
            case CallDone() | CallFailed() | CommandExpired():
                self._counts(fact)["closed"] += 1
                if not isinstance(fact, CommandExpired) or fact.final:
                    self._end(fact)
            case LoopDone():
                self._end_loop(fact)
            case StepEntered():
                self._check_entered(fact)
            case StepExited() | StepFailed():
                self._check_left(fact)
            case ExecutionCompleted():
                waiting = (self.state.visits, self.state.arrivals)
                assert not any(waiting), f"it completed with tokens left: {waiting}"
            case ExecutionFailed():
                last = self.events[-1].fact
                assert isinstance(last, StepFailed), f"it failed after {last}"
                assert not last.hops, f"it failed although {last} is handled"
            case _:
                pass

    def _check_issued(self, fact: CommandIssued) -> None:
        assert (fact.step, fact.visit, fact.iter_index) not in self._ended, fact
        assert fact.attempt <= ATTEMPTS_MAX, fact
        counts = self._counts(fact)
        counts["issued"] += 1
        if fact.loop_id is not None and fact.attempt == 1:
            loop = self.state.visits[f"{fact.step}.{fact.visit}"].loop  # type: ignore[index]
            assert loop is not None, fact
            assert not (loop.fail_fast and counts["failed"]), f"{fact} after a failure"

    def _check_entered(self, fact: StepEntered) -> None:
        """A barrier is entered with all tokens that wait, when no other can come any more."""
        waiting = self.state.arrivals.get(fact.step, 0)
        if not self._roads.is_barrier(fact.step) or not waiting:
            return
        assert fact.tokens == waiting, (fact, waiting)
        live = {visit.step for visit in self.state.visits.values()} | self.state.arrivals.keys()
        coming = [name for name in live if fact.step in self._roads.ahead[name]]
        assert not coming, f"{fact} while tokens at {coming} may still come"

    def _check_left(self, fact: Left) -> None:
        spec = self._roads.playbook.steps[fact.step].next
        assert spec.spec.mode == "inclusive" or len(fact.hops) <= 1, fact
        targets = [arc.step for arc in spec.arcs]
        assert all(hop.step in targets for hop in fact.hops), fact
        assert all(hop.barrier == self._roads.is_barrier(hop.step) for hop in fact.hops), fact
        # The first arc without a guard is always taken, unless one before it was.
        if isinstance(fact, StepExited) and any(arc.when is None for arc in spec.arcs):
            assert fact.hops, fact

    def _end(self, fact: CallDone | CallFailed | CommandExpired) -> None:
        ending = (fact.step, fact.visit, fact.iter_index)
        assert ending not in self._ended, f"{ending} ended twice"
        self._ended.add(ending)
        self._counts(fact)["done" if isinstance(fact, CallDone) else "failed"] += 1
        self.lost_for_good |= isinstance(fact, CommandExpired)

    def _end_loop(self, fact: LoopDone) -> None:
        counts = self._loops[fact.loop_id]
        counts["loop.done"] += 1
        assert counts["loop.done"] == 1, f"{fact} twice"
        assert (counts["done"], counts["failed"]) == (fact.done, fact.failed), (fact, counts)
        assert counts["issued"] == counts["closed"], (fact, counts)
        gave_up = fact.status == "error"
        assert gave_up or fact.done + fact.failed == fact.total, fact
        policy = self._roads.playbook.steps[fact.step].spec.policy.failure.mode
        assert gave_up == (policy == "fail_fast" and fact.failed > 0), fact

    def _counts(self, fact: OfCommand) -> Counter[str]:
        return Counter() if fact.loop_id is None else self._loops[fact.loop_id]

    def _check_loops(self) -> None:
        for visit in self.state.visits.values():
            if (loop := visit.loop) is not None:
                counts = self._loops[loop.loop_id]
                assert loop.in_flight == counts["issued"] - counts["closed"], (loop, counts)
                assert loop.done == counts["done"], (loop, counts)
                assert loop.failed == counts["failed"], (loop, counts)
                assert loop.in_flight <= self._window(visit.step), loop
                assert loop.next_index <= loop.total, loop

    def _window(self, step: StepName) -> int:
        loop = self._roads.playbook.steps[step].loop
        assert loop is not None, step
        return 1 if loop.spec.mode == "sequential" else loop.spec.max_in_flight

    def check_end(self) -> None:
        """What holds of a whole log once its execution is over."""
        ends = [event for event in self.events if isinstance(event.fact, _ENDS)]
        assert len(ends) == 1, ends
        if isinstance(ends[0].fact, ExecutionCompleted):
            assert all(counts["loop.done"] == 1 for counts in self._loops.values()), self._loops
        left_over = (self.state.visits, self.state.commands, self.state.arrivals)
        assert not any(left_over), left_over

    def check_prefix(self, length: int) -> None:
        """Folding a prefix twice is folding it once, and what follows fits both."""
        state = ExecutionState(execution_id=self.state.execution_id)
        for event in self.events[:length]:
            fold(state, event)
        once = encode_state(state)
        for event in self.events[:length]:
            fold(state, event)
        assert encode_state(state) == once, length
        for event in self.events[length:]:
            fold(state, event)
        assert encode_state(state) == encode_state(self.state), length


class Roads:
    """Where the arcs of a playbook lead, without those that lead back."""

    def __init__(self, playbook: Playbook) -> None:
        self.playbook = playbook
        self._back: set[tuple[StepName, StepName]] = set()
        self._walk(playbook.entry_step, (), set())
        self.ahead: dict[StepName, set[StepName]] = {}
        for name in playbook.steps:
            self._look_ahead(name)
        self._barriers = {name for name in playbook.steps if self._joins(name)}

    def is_barrier(self, name: StepName) -> bool:
        return name in self._barriers

    def _joins(self, name: StepName) -> bool:
        join = self.playbook.steps[name].spec.join
        coming_in = [
            arc.step
            for source, step in self.playbook.steps.items()
            for arc in step.next.arcs
            if arc.step == name and (source, name) not in self._back
        ]
        return join == "all" or (join is None and len(coming_in) > 1)

    def _walk(self, name: StepName, above: tuple[StepName, ...], seen: set[StepName]) -> None:
        seen.add(name)
        for arc in self.playbook.steps[name].next.arcs:
            if arc.step in (*above, name):
                self._back.add((name, arc.step))
            elif arc.step not in seen:
                self._walk(arc.step, (*above, name), seen)

    def _look_ahead(self, name: StepName) -> set[StepName]:
        if name not in self.ahead:
            ahead: set[StepName] = set()
            for arc in self.playbook.steps[name].next.arcs:
                if (name, arc.step) not in self._back:
                    ahead |= {arc.step} | self._look_ahead(arc.step)
            self.ahead[name] = ahead
        return self.ahead[name]


@per_playbook
def roads_of(playbook: Playbook) -> Roads:
    return Roads(playbook)
