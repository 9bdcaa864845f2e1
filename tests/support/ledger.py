"""The log of one execution, and the rules that every log keeps: checked as each fact is recorded.

Nothing here asks the domain what is right, but for `fold`: the rules are written down a second
time, from the language's description, in the simplest way that is right for a few steps.
"""

from collections import Counter
from collections.abc import Mapping

import msgspec

from noetl_core.domain.events import (
    Again,
    AnyFact,
    CallDone,
    CallFailed,
    CallPartial,
    CommandClaimed,
    CommandExpired,
    CommandIssued,
    CommandParked,
    Event,
    ExecutionCancelled,
    ExecutionCompleted,
    ExecutionFailed,
    ExecutionPaused,
    ExecutionResumed,
    ExecutionRetried,
    ExecutionStarted,
    FaninCompleted,
    FanoutStarted,
    Hop,
    LoopDone,
    LoopStarted,
    RetryCompleted,
    ShardDone,
    ShardEnqueued,
    ShardFailed,
    SignalReceived,
    StepAborted,
    StepEntered,
    StepExited,
    StepFailed,
    StepSkipped,
)
from noetl_core.domain.fold import fold
from noetl_core.domain.ids import (
    CatalogId,
    CommandId,
    EventId,
    ExecutionId,
    LoopId,
    StepName,
    parse_command_id,
)
from noetl_core.domain.playbook import Playbook, Step, per_playbook
from noetl_core.domain.state import ExecutionState, OpenCommand, Visit
from noetl_core.domain.timers import is_timed_by_broker
from support.playbooks import ERROR_GUARDS, Plan

LOSSES_MAX = 5
ROWS_OF_PLAIN_ITERATION = 3
ROWS_OF_PLAIN_SHARD = 4

Ended = CallDone | CallFailed | CommandExpired
Left = StepExited | StepFailed
Item = tuple[str, int, int | None]
"""A call of a step: its visit, and the item of the loop."""
Page = tuple[str, int, int | None, int]
Given = tuple[StepName, bytes]
"""A step, and what the token that entered it had brought along."""

_ENDS = (ExecutionCompleted, ExecutionFailed, ExecutionCancelled)
_NEVER_BETTER = {"template_rendering", "playbook_invalid"}

encode_state = msgspec.json.Encoder(order="deterministic").encode
"""The same bytes for states that differ in the order of their keys only."""


class Ledger:
    def __init__(self, execution_id: ExecutionId, catalog: Mapping[CatalogId, Plan]) -> None:
        self.events: list[Event] = []
        self.keys: set[str] = set()
        self.state = ExecutionState(execution_id=execution_id)
        """fold(all): what every other copy of the state is held against."""
        self.lost_for_good = False
        """Whether a command ran out of attempts: then the execution may end otherwise."""
        self._catalog = catalog
        self._issued: dict[CommandId, CommandIssued] = {}
        self._owed: CommandIssued | None = None
        """The attempt that the last event has promised."""
        self._finished: set[Item] = set()
        """Calls that are over: no further attempt, no further page."""
        self._succeeded: set[Page] = set()
        self._losses: Counter[Page] = Counter()
        self._failures: Counter[Page] = Counter()
        self._given_back: Counter[Page] = Counter()
        self._sequences: dict[Item, EventId] = {}
        self._loops: dict[LoopId, Counter[str]] = {}
        self._started: dict[LoopId, LoopStarted] = {}
        self._signals: dict[int, str] = {}
        self._signals_used: set[int] = set()
        self._parked: dict[CommandId, CommandParked] = {}
        self._reentered: list[StepName] = []
        """Steps that a retry of the execution has still to enter."""
        self._held_back: dict[StepName, int] = {}
        """Tokens that waited at a barrier when the execution ended."""
        self._cut_off: list[Given] = []
        """What the visits that were under way at the end had been given."""
        self._given: dict[StepName, Given] = {}
        """What the latest visit of each step had been given."""
        self._given_to: dict[tuple[str, int], Given] = {}
        self._redone: dict[tuple[str, int], int] = {}
        """Visits that a retry has begun, and the latest visit of the step before it."""

    @property
    def plan(self) -> Plan:
        return self._catalog[self.state.catalog_id]

    def child_of(self, command_id: CommandId) -> ExecutionId | None:
        return self._parked[command_id].child if command_id in self._parked else None

    @property
    def children(self) -> list[ExecutionId]:
        return [fact.child for fact in self._parked.values() if fact.child is not None]

    def record(self, event: Event, key: str) -> None:
        fact = event.fact
        assert not self.state.is_terminal or isinstance(fact, ExecutionRetried), f"{fact} too late"
        assert key not in self.keys, f"{key} twice"
        if not isinstance(fact, ExecutionStarted):
            self._check_owed(fact)
            self._check(event, fact)
        self.keys.add(key)
        self.events.append(event)
        waited = dict(self._held_back)
        fold(self.state, event)
        self._check_loops()
        if isinstance(fact, ExecutionRetried):
            arrivals = Counter(waited) + Counter(fact.entries)
            assert self.state.arrivals == arrivals, (fact, waited, self.state.arrivals)

    def _check(self, event: Event, fact: AnyFact) -> None:  # noqa: C901, PLR0912 - one case an event
        match fact:
            case LoopStarted():
                self._start_loop(LoopId(event.event_id), fact)
            case CommandIssued():
                self._check_issued(fact)
            case CommandParked():
                self._check_parked(event, fact)
            case CallDone() | CallFailed() | CommandExpired():
                self._end_attempt(event, fact)
            case CommandClaimed():
                self._count_row(fact)
            case CallPartial():
                self._check_chunk(fact)
            case ShardEnqueued():
                self._counts(fact)["enqueued"] += 1
                self._count_row(fact)
            case RetryCompleted():
                self._check_pages(fact)
            case LoopDone():
                self._end_loop(fact)
            case StepEntered():
                self._check_entered(fact)
            case StepExited() | StepFailed():
                self._check_left(fact)
            case StepAborted():
                self._abort(fact)
            case SignalReceived():
                self._signals[fact.signal_id] = fact.name
            case ExecutionPaused():
                assert self.state.status == "RUNNING", self.state.status
            case ExecutionResumed():
                assert self.state.status == "PAUSED", self.state.status
            case ExecutionRetried():
                self._check_retried(fact)
            case ExecutionCompleted() | ExecutionFailed() | ExecutionCancelled():
                self._check_end(fact)
            case _:
                pass

    # Attempts and pages

    def _check_owed(self, fact: AnyFact) -> None:
        """What an ended attempt promised is the next thing that happens."""
        owed, self._owed = self._owed, None
        if owed is not None:
            assert fact == owed, (fact, owed)

    def _check_issued(self, fact: CommandIssued) -> None:
        item = _item(fact)
        assert item not in self._finished, fact
        assert (*item, fact.page) not in self._succeeded, fact
        assert self.state.status in {"RUNNING", "PAUSED"}, fact
        visit = self.state.visits[f"{fact.step}.{fact.visit}"]  # type: ignore[index]
        assert not [c for c in self.state.commands.values() if _item_of(c) == item], fact
        self._issued[fact.command_id] = fact
        counts = self._counts(fact)
        counts["issued"] += 1
        self._count_row(fact)
        if visit.loop is not None and fact.attempt == 1 and fact.page == 1:
            assert not (visit.loop.fail_fast and counts["failed"]), f"{fact} after a failure"
            counts["begun"] += 1
            if visit.loop.is_fanout:
                assert counts["enqueued"] == counts["begun"], (fact, counts)

    def _check_parked(self, event: Event, fact: CommandParked) -> None:
        assert fact.command_id not in self._parked, fact
        assert self.state.commands[fact.command_id].parked is None, fact
        assert fact.child is None or EventId(fact.child) == event.event_id, fact
        self._parked[fact.command_id] = fact
        self._count_row(fact)

    def _check_chunk(self, fact: CallPartial) -> None:
        """In their order, each once, whichever attempt has sent it."""
        assert fact.chunk_index == self.state.commands[fact.command_id].chunks, fact
        arcs = [arc for arc in self._step(fact).next.arcs if arc.on is not None]
        self._check_hops(fact.hops, [arc.step for arc in arcs])
        self._count_row(fact)

    def _end_attempt(self, event: Event, fact: Ended) -> None:
        page = _page(fact)
        self._counts(fact)["closed"] += 1
        self._count_row(fact)
        self._check_signal(fact)
        match fact:
            case CallDone():
                assert page not in self._succeeded, f"{fact} twice"
                self._succeeded.add(page)
                sent = self.state.commands[fact.command_id].chunks
                assert sent == self.plan.tools[fact.step].chunks, f"{fact} after {sent} chunks"
                self._check_page(event, fact)
            case CallFailed():
                self._check_retry(fact)
                self._failures[page] += 1
            case CommandExpired() if _was_given_back(fact):
                assert fact.again is not None, fact
                self._given_back[page] += 1
            case CommandExpired():
                self._losses[page] += 1
                assert (fact.again is None) == (self._losses[page] >= LOSSES_MAX), fact
                self.lost_for_good |= fact.again is None
        if fact.again is None:
            self._end_item(fact)
        else:
            self._owe(event, fact, fact.again)

    def _owe(self, event: Event, fact: Ended, again: Again) -> None:
        """Another attempt at this page, or the first at the next one."""
        page = _page(fact)
        before = self._issued[fact.command_id]
        if isinstance(fact, CallDone):
            assert (again.attempt, again.page) == (1, page[3] + 1), fact
            assert again.sequence == self._sequences[page[:3]], fact
        else:
            assert (again.attempt, again.page) == (fact.attempt + 1, page[3]), fact
            assert again.failures == self._failures[page], fact
            assert again.given_back == self._given_back[page], fact
            assert (again.sequence, again.call) == (before.sequence, before.call), fact
            assert again.chunks == self.state.commands[fact.command_id].chunks, fact
        item = "" if fact.iter_index is None else f"/{fact.iter_index}"
        turned = "" if again.page == 1 else f"@{again.page}"
        name = CommandId(f"{fact.step}.{fact.visit}{item}{turned}#{again.attempt}")
        self._owed = msgspec.structs.replace(
            before,
            command_id=name,
            attempt=again.attempt,
            page=again.page,
            failures=again.failures,
            given_back=again.given_back,
            call=again.call,
            sequence=again.sequence,
            chunks=again.chunks,
            delay_s=again.delay_s,
            parent_event_id=event.event_id,
        )

    def _check_retry(self, fact: CallFailed) -> None:
        """A failure is tried again exactly as often as the step says."""
        step = self._step(fact)
        failures = self._failures[_page(fact)] + 1
        rule = step.retry.on_error
        loop = self._started.get(fact.loop_id) if fact.loop_id is not None else None
        if rule is not None:
            is_wanted = failures < rule.max_attempts and self._is_worth_it(fact, rule.when)
        elif isinstance(loop, FanoutStarted):
            is_worth_it = fact.error.kind not in _NEVER_BETTER
            is_wanted = failures <= step.spec.fanout.max_shard_retries and is_worth_it
        else:
            is_wanted = False
        is_shard = isinstance(loop, FanoutStarted) and fact.again is None
        assert isinstance(fact, ShardFailed) == is_shard, fact
        if self._was_not_to_fail(fact):
            return  # `while` itself has failed: there is nothing that another attempt could change
        assert (fact.again is not None) == is_wanted, (fact, failures)
        if fact.again is not None and rule is not None and not rule.jitter:
            factor = {"fixed": 1, "linear": failures, "exponential": 2 ** (failures - 1)}
            delay_s = min(rule.initial_delay * factor[rule.backoff], rule.max_delay)
            assert fact.again.delay_s >= delay_s, fact
            assert rule.circuit is not None or fact.again.delay_s == delay_s, fact

    def _is_worth_it(self, fact: CallFailed, guard: str | None) -> bool:
        if guard is None:
            return fact.error.kind not in _NEVER_BETTER
        return ERROR_GUARDS[guard] if fact.error.kind == "boom" else False

    def _was_not_to_fail(self, fact: CallFailed) -> bool:
        is_rendering = fact.error.kind == "template_rendering"
        return is_rendering and self._step(fact).retry.on_success is not None

    def _check_page(self, event: Event, fact: CallDone) -> None:
        rule = self._step(fact).retry.on_success
        item, page = _page(fact)[:3], _page(fact)[3]
        loop = self._started.get(fact.loop_id) if fact.loop_id is not None else None
        is_shard = isinstance(loop, FanoutStarted) and fact.again is None
        assert isinstance(fact, ShardDone) == is_shard, fact
        if rule is None:
            assert (fact.again, page, fact.sequence) == (None, 1, None), fact
            return
        if page == 1:
            assert fact.sequence is None, fact
            self._sequences[item] = event.event_id
        else:
            assert fact.sequence == self._sequences[item], fact
        pages = self.plan.tools[fact.step].pages
        more = page < 3 if "page < 3" in rule.condition else page < pages
        if "iter.index" in rule.condition:
            more &= item[2] == 0
        if "iter.last" in rule.condition:
            assert loop is not None, fact
            more &= item[2] != loop.base_done + loop.total - 1
        assert (fact.again is not None) == (more and page < rule.max_attempts), fact

    def _check_pages(self, fact: RetryCompleted) -> None:
        item = (fact.step, fact.visit, fact.iter_index)
        assert fact.sequence == self._sequences[item], fact
        pages = sorted(page[3] for page in self._succeeded if page[:3] == item)
        assert pages == list(range(1, fact.pages + 1)), (fact, pages)
        self._count_row(fact)

    def _check_signal(self, fact: Ended) -> None:
        signal_id = getattr(fact, "signal_id", None)
        if signal_id is not None:
            assert signal_id not in self._signals_used, f"{fact} by a signal that is used up"
            self._signals_used.add(signal_id)
            assert self._parked[fact.command_id].signal == self._signals[signal_id], fact

    def _end_item(self, fact: Ended) -> None:
        item = _item(fact)
        assert item not in self._finished, f"{item} ended twice"
        self._finished.add(item)
        counts = self._counts(fact)
        is_done = isinstance(fact, CallDone)
        if fact.loop_id is not None and self._started[fact.loop_id].is_cursor:
            is_empty = is_done and not getattr(fact, "frame_rows", None)
            counts["slots ended"] += is_empty or not is_done
            counts["done"] += is_done and not is_empty
        else:
            counts["done"] += is_done
        counts["failed"] += not is_done
        if fact.loop_id is not None and (fact.attempt, _page(fact)[3]) == (1, 1):
            self._check_rows(fact)

    def _abort(self, fact: StepAborted) -> None:
        own = {c for c, o in self.state.commands.items() if (o.step, o.visit) == _visit(fact)}
        assert set(fact.commands) == own, (fact, own)
        for command_id in own:
            self._finished.add(_item_of(self.state.commands[command_id]))

    # Loops

    def _start_loop(self, loop_id: LoopId, fact: LoopStarted) -> None:
        self._loops[loop_id] = Counter()
        self._started[loop_id] = fact
        loop = self._step(fact).loop
        assert loop is not None, fact
        assert isinstance(fact, FanoutStarted) == (loop.spec.mode == "fanout"), fact
        assert fact.is_cursor == (loop.spec.mode == "cursor"), fact
        if fact.base is not None:
            before = self._started[fact.base]
            assert (before.step, before.visit) == (fact.step, self._redone[_visit(fact)]), fact
            assert fact.collection_id in self._started, fact

    def _end_loop(self, fact: LoopDone) -> None:
        counts, started = self._loops[fact.loop_id], self._started[fact.loop_id]
        counts["loop.done"] += 1
        assert counts["loop.done"] == 1, f"{fact} twice"
        done = started.base_done + counts["done"]
        assert (done, counts["failed"]) == (fact.done, fact.failed), (fact, counts)
        assert counts["issued"] == counts["closed"], (fact, counts)
        is_fanout = isinstance(started, FanoutStarted)
        assert isinstance(fact, FaninCompleted) == is_fanout, fact
        step = self._step(fact)
        fail_fast = step.spec.policy.failure.mode == "fail_fast"
        if is_fanout:
            fail_fast = step.spec.fanout.fail_fast
            failed = fail_fast or not step.spec.fanout.allow_partial or not fact.done
            status = "failed" if failed else "partial"
            assert fact.fanin == (status if fact.failed else "complete"), fact
            assert (fact.status == "error") == (fact.fanin == "failed"), fact
        else:
            assert (fact.status == "error") == (fail_fast and fact.failed > 0), fact
        if started.is_cursor:
            assert fact.total == fact.done + fact.failed, fact
            gave_up = fail_fast and fact.failed > 0
            assert gave_up or counts["slots ended"] == started.max_in_flight, (fact, counts)
        else:
            assert fact.total == started.base_done + started.total, fact
            gave_up = fail_fast and fact.failed > 0
            assert gave_up or fact.done + fact.failed == fact.total, fact

    def _check_loops(self) -> None:
        for visit in self.state.visits.values():
            if (loop := visit.loop) is not None:
                counts = self._loops[loop.loop_id]
                assert loop.in_flight == counts["issued"] - counts["closed"], (loop, counts)
                assert loop.done == counts["done"], (loop, counts)
                assert loop.failed == counts["failed"], (loop, counts)
                assert loop.next_index == counts["begun"], (loop, counts)
                assert loop.slots_ended == counts["slots ended"], (loop, counts)
                assert loop.in_flight <= self._window(visit.step), loop
                assert loop.is_cursor or loop.next_index <= loop.total, loop

    def _window(self, step: StepName) -> int:
        loop = self.plan.playbook.steps[step].loop
        assert loop is not None, step
        return 1 if loop.spec.mode == "sequential" else loop.spec.max_in_flight

    def _count_row(self, fact: AnyFact) -> None:
        index = getattr(fact, "iter_index", None)
        if index is not None:
            self._counts(fact)[f"rows of {index}"] += 1
            if isinstance(fact, CallPartial | CommandParked):
                self._counts(fact)[f"extra rows of {index}"] += 1

    def _check_rows(self, fact: Ended) -> None:
        """An iteration that nothing happened to costs as many rows as it must."""
        counts = self._counts(fact)
        rows = counts[f"rows of {fact.iter_index}"] - counts[f"extra rows of {fact.iter_index}"]
        is_shard = isinstance(self._started.get(fact.loop_id or LoopId(0)), FanoutStarted)
        assert rows <= (ROWS_OF_PLAIN_SHARD if is_shard else ROWS_OF_PLAIN_ITERATION), (fact, rows)

    def _counts(self, fact: AnyFact) -> Counter[str]:
        loop_id = getattr(fact, "loop_id", None)
        return Counter() if loop_id is None else self._loops[loop_id]

    # Tokens

    def _check_entered(self, fact: StepEntered) -> None:
        """A barrier is entered with all tokens that wait, when no other can come any more."""
        roads = roads_of(self.plan.playbook)
        is_reentered = fact.step in self._reentered
        if is_reentered:
            self._check_reentered(fact)
        self._given[fact.step] = self._given_to[_visit(fact)] = _given(fact)
        if is_reentered:
            return
        waiting = self.state.arrivals.get(fact.step, 0)
        if not roads.is_barrier(fact.step) or not waiting:
            return
        assert fact.tokens == waiting, (fact, waiting)
        live = {visit.step for visit in self.state.visits.values()} | self.state.arrivals.keys()
        coming = [name for name in live - {fact.step} if roads.reaches(name, fact.step)]
        assert not coming, f"{fact} while tokens at {coming} may still come"

    def _check_reentered(self, fact: StepEntered) -> None:
        """It goes on with what it had."""
        self._reentered.remove(fact.step)
        self._redone[_visit(fact)] = self.state.steps[fact.step].visit
        if self._cut_off:
            assert _given(fact) in self._cut_off, (fact, self._cut_off)
            self._cut_off.remove(_given(fact))
        else:
            # A fork may begin at a step that only the execution it comes from has entered.
            nothing = (fact.step, encode_state([{}, None]))
            assert _given(fact) == self._given.get(fact.step, nothing), (fact, self._given)

    def _check_left(self, fact: Left) -> None:
        step = self._step(fact)
        arcs = [arc for arc in step.next.arcs if arc.on is None]
        assert step.next.spec.mode == "inclusive" or len(fact.hops) <= 1, fact
        self._check_hops(fact.hops, [arc.step for arc in arcs])
        own = [c for c, o in self.state.commands.items() if (o.step, o.visit) == _visit(fact)]
        assert not own, (fact, own)
        # The first arc without a guard is always taken, unless one before it was.
        if isinstance(fact, StepExited) and any(arc.when is None for arc in arcs):
            assert fact.hops, fact
        if isinstance(fact, StepSkipped):
            assert step.spec.policy.admit, fact
        if isinstance(fact, StepFailed):
            assert fact.handled == bool(fact.hops), fact

    def _check_hops(self, hops: tuple[Hop, ...], targets: list[StepName]) -> None:
        roads = roads_of(self.plan.playbook)
        assert all(hop.step in targets for hop in hops), (hops, targets)
        assert all(hop.barrier == roads.is_barrier(hop.step) for hop in hops), hops

    # Ends

    def _check_retried(self, fact: ExecutionRetried) -> None:
        assert self.state.is_terminal, fact
        assert fact.generation == self.state.generation + 1, fact
        self._reentered = list(fact.entries)
        if sorted(fact.entries) != sorted(given[0] for given in self._cut_off):
            assert len(fact.entries) == 1, (fact, self._cut_off)
            self._cut_off = []

    def _check_end(self, fact: ExecutionCompleted | ExecutionFailed | ExecutionCancelled) -> None:
        assert fact.generation == self.state.generation, fact
        assert not self._reentered, (fact, self._reentered)
        self._cut_off = [_given(visit) for visit in self.state.visits.values()]
        self._held_back = dict(self.state.arrivals)
        if isinstance(fact, ExecutionCompleted):
            waiting = (self.state.visits, self.state.arrivals, self.state.commands)
            assert not any(waiting), f"it completed with tokens left: {waiting}"
            final = self.plan.playbook.executor.spec.final_step
            assert final is None or final in self.state.steps, fact
        elif isinstance(fact, ExecutionFailed) and fact.step is not None:
            last = self.events[-1].fact
            assert isinstance(last, StepFailed), f"it failed after {last}"
            assert not last.hops, f"it failed although {last} is handled"
            self._cut_off.append(self._given_to[_visit(last)])
        elif isinstance(fact, ExecutionFailed):
            is_unknown = self.state.catalog_id not in self._catalog
            assert fact.error.kind == ("internal" if is_unknown else "timeout"), fact

    def timers(self) -> set[str]:
        """The timers without which something would never end."""
        if not self.state.is_open:
            return set()
        names = {
            f"step:{name}"
            for name, visit in self.state.visits.items()
            if is_timed_by_broker(self.plan.playbook.steps[visit.step])
        }
        names |= {
            f"wait:{name}"
            for name, command in self.state.commands.items()
            if command.parked is not None and command.parked.until_ms is not None
        }
        return names

    def check_end(self) -> None:
        """What holds of a whole log once its execution is over."""
        ends = [event for event in self.events if isinstance(event.fact, _ENDS)]
        retries = [event for event in self.events if isinstance(event.fact, ExecutionRetried)]
        assert len(ends) == 1 + len(retries), (ends, retries)
        if isinstance(ends[-1].fact, ExecutionCompleted) and len(ends) == 1:
            undone = [i for i, counts in self._loops.items() if not counts["loop.done"]]
            aborted = {f.fact.step for f in self.events if isinstance(f.fact, StepAborted)}
            assert all(self._started[i].step in aborted for i in undone), undone
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

    def _step(self, fact: AnyFact) -> Step:
        return self.plan.playbook.steps[fact.step]  # type: ignore[union-attr,index]


def _given(entry: StepEntered | Visit) -> Given:
    return entry.step, encode_state([entry.input, entry.chunk])


def _visit(fact: AnyFact) -> tuple[str, int]:
    return fact.step, fact.visit  # type: ignore[union-attr,return-value]


def _item(fact: CommandIssued | Ended) -> Item:
    return fact.step, fact.visit, fact.iter_index


def _page(fact: Ended) -> Page:
    return (*_item(fact), parse_command_id(fact.command_id).page)


def _was_given_back(fact: CommandExpired) -> bool:
    return "has given it back" in fact.error.message


def _item_of(command: OpenCommand) -> Item:
    return command.step, command.visit, command.index


class Roads:
    """Where the arcs of a playbook lead, and which of them lead back."""

    def __init__(self, playbook: Playbook) -> None:
        self.playbook = playbook
        self._arcs = {
            (name, arc.step) for name, step in playbook.steps.items() for arc in step.next.arcs
        }
        self._back: set[tuple[StepName, StepName]] = set()
        self._walk(playbook.entry_step, (), set())
        self._barriers = {name for name in playbook.steps if self._joins(name)}
        self._reached: dict[StepName, set[StepName]] = {}

    def is_barrier(self, name: StepName) -> bool:
        return name in self._barriers

    def reaches(self, source: StepName, target: StepName) -> bool:
        """Whether a token can get there without beginning another turn of a loop around it."""
        if target not in self._reached:
            around = {head for _, head in self._back if target in self._body(head)}
            arcs = {a for a in self._arcs if a not in self._back or a[1] not in around}
            self._reached[target] = {
                name for name in self.playbook.steps if target in _ahead(arcs, name)
            }
        return source in self._reached[target]

    def _body(self, head: StepName) -> set[StepName]:
        """The steps from which an arc back to the head can be reached, but not by way of it."""
        ends = {source for source, target in self._back if target == head}
        arcs = {(a, b) for a, b in self._arcs if b != head}
        return {n for n in self.playbook.steps if ends & ({n} | _ahead(arcs, n))} | {head}

    def _joins(self, name: StepName) -> bool:
        join = self.playbook.steps[name].spec.join
        arcs = [
            (source, arc)
            for source, step in self.playbook.steps.items()
            for arc in step.next.arcs
            if arc.step == name
        ]
        if any(arc.on is not None for _, arc in arcs):
            return join == "all"
        coming_in = [source for source, _ in arcs if (source, name) not in self._back]
        return join == "all" or (join is None and len(coming_in) > 1)

    def _walk(self, name: StepName, above: tuple[StepName, ...], seen: set[StepName]) -> None:
        seen.add(name)
        for arc in self.playbook.steps[name].next.arcs:
            if arc.step in (*above, name):
                self._back.add((name, arc.step))
            elif arc.step not in seen:
                self._walk(arc.step, (*above, name), seen)


def _ahead(arcs: set[tuple[StepName, StepName]], name: StepName) -> set[StepName]:
    found: set[StepName] = set()
    waiting = [name]
    while waiting:
        source = waiting.pop()
        for target in (b for a, b in arcs if a == source):
            if target not in found:
                found.add(target)
                waiting.append(target)
    return found


@per_playbook
def roads_of(playbook: Playbook) -> Roads:
    return Roads(playbook)
