"""Random playbooks in a failing world: what must hold after every step, and at the end.

A case is a random playbook, a random sequence of progress and faults, and then calm, in which it
has to end. `World` runs the real broker; the rules of the log are checked as each fact is recorded
(support/ledger.py), the rest after every step and at the end.

A failure prints the steps that led to it, the smallest that were found. The same seed gives the
same cases: NOETL_SIMULATION_SEED=17 pytest tests/simulation
"""

import itertools
import math
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import ClassVar, Literal, cast

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from noetl_core.domain.ids import ExecutionId
from noetl_core.wire.messages import Cancel, Pause, Resume, Retry
from support.memory_database import CommitFault, in_memory
from support.playbooks import APPROVERS, Plan, plans
from support.world import World

QUICK_CASES = 400
FULL_CASES = 20_000
SHARES = 2
"""Each in a process; as many everywhere, so that a seed has the same cases on every machine."""
STEPS = 16
SEED = int(os.environ.get("NOETL_SIMULATION_SEED", "1"))

BATCH = 9
"""Cases of one run of Hypothesis. After ten it prefers variations of what it has tried already,
and new playbooks are worth more here."""

COMMITS: tuple[CommitFault, ...] = (
    *("none",) * 8,
    *("refused", "answer lost", "late", "late", "overtaken"),
)
HAPPENS_TO_BROKERS = (
    *("crashes", "crashes after its commit", "forgets", "forgets all but snapshots"),
    *("is given up for dead", "wakes", "wakes"),
)
ODD = (
    *("message lost", "message repeated", "lease over", "leases over", "commands given back"),
    *("epoch closed", "started again", "completion forged", "command row lost"),
)
ASKED = (
    *("cancelled", "paused", "paused", "resumed"),
    *("retried", "retried", "retried whole", "begun at a step", "forked"),
)
ALL = frozenset({"PENDING", "RUNNING", "PAUSED", "COMPLETED", "FAILED", "CANCELLED"})
ENDED_EARLY = frozenset({"FAILED", "CANCELLED"})
MATTERS_TO = {
    "paused": frozenset({"RUNNING"}),
    "resumed": frozenset({"PAUSED"}),
    "cancelled": frozenset({"RUNNING", "PAUSED"}),
    "retried": ENDED_EARLY,
    "retried whole": ENDED_EARLY,
    "begun at a step": ENDED_EARLY | {"COMPLETED"},
}
"""Of which executions something is asked for, mostly."""
SIGNALS = ("go", "s0", "s1", "s2", "s3", "s4", "c0")

numbers = st.integers(0, 15)
workers = st.integers(0, 1)


class Simulation(RuleBasedStateMachine):
    cases: ClassVar[int] = 0
    """How many were run to their end and found right, but for the empty one that comes first."""
    world: World | None = None

    @initialize(plan=plans(), executions=st.integers(1, 2), meddling=st.integers(0, 3))
    def begin(self, plan: Plan, executions: int, meddling: int) -> None:
        """In half of the cases people and timers keep out of it, so that its end can be told."""
        self.world = World(plan, executions=executions)
        self.is_meddled_with = meddling >= 2
        if meddling % 2:
            self.world.advance(self.world.letters())

    # Progress, not always in order

    @rule(fault=st.sampled_from(COMMITS), acknowledged=st.booleans(), in_order=st.booleans())
    def broker_takes_everything(
        self, fault: CommitFault, acknowledged: bool, in_order: bool
    ) -> None:
        """What is not acknowledged comes again."""
        letters = self._world.letters() if in_order else self._world.letters_backwards()
        self._world.advance(letters, fault, acknowledged=acknowledged)

    @rule(pick=numbers, count=st.integers(1, 3), fault=st.sampled_from(COMMITS))
    def broker_takes_a_few(self, pick: int, count: int, fault: CommitFault) -> None:
        self._world.advance(self._world.letters(range(pick, pick + count)), fault)

    @rule(
        worker=workers,
        limit=st.integers(1, 5),
        finishes=st.integers(0, 4),
        says=st.sampled_from(("nothing", "what is done", "what is done", "and is heard")),
    )
    def worker_works(self, worker: int, limit: int, finishes: int, says: str) -> None:
        """Nobody hears of what the greedy one has taken."""
        one = self._world.workers[worker]
        if not one.is_suspended:
            one.lease(limit, is_heard=limit < 5)
            one.finish(finishes)
            if says != "nothing":
                one.report()
        if says == "and is heard":
            self._world.advance(self._world.letters())

    @rule(limit=st.integers(1, 4), finishes=st.integers(1, 4))
    def work_goes_on(self, limit: int, finishes: int) -> None:
        """As it should, but for what is not finished yet."""
        for worker in (0, 1):
            self._world.advance(self._world.letters())
            self.worker_works(worker, limit, finishes, "what is done")

    @rule(worker=workers, chunks=st.integers(1, 2))
    def worker_streams(self, worker: int, chunks: int) -> None:
        self._world.workers[worker].stream(chunks)

    @rule(worker=workers, confirms=st.booleans(), one_by_one=st.booleans())
    def worker_ends_its_work_the_last_first(
        self, worker: int, confirms: bool, one_by_one: bool
    ) -> None:
        one = self._world.workers[worker]
        if not one.is_suspended:
            if confirms:
                one.heartbeat()
            one.finish(10, newest_first=True)
            one.report(one_by_one=one_by_one)

    @rule(rounds=st.integers(1, 2))
    def all_is_well_for_a_while(self, rounds: int) -> None:
        for _ in range(rounds):
            self._world.calm_round()

    @rule(limit=st.integers(1, 30), crash=st.sampled_from(("no", "no", "before", "after")))
    def projection_projects(self, limit: int, crash: Literal["no", "before", "after"]) -> None:
        self._world.projection.project(limit, crash=crash)

    # Faults

    @rule(what=st.sampled_from(HAPPENS_TO_BROKERS), late_first=st.booleans())
    def something_happens_to_the_broker(self, what: str, late_first: bool) -> None:
        world = self._world
        if late_first:
            world.database.settle_late()
        match what:
            case "crashes":
                world.crash_broker()
            case "crashes after its commit":
                world.crash_broker(after_commit_of=world.letters())
            case "forgets":
                world.broker.forget()
            case "forgets all but snapshots":
                world.projection.project(1000)
                world.broker.forget()
            case "is given up for dead":
                world.take_over()
            case _ if world.sleeping:
                world.wake_sleeper(world.letters())

    @rule(worker=workers, crashes=st.booleans())
    def worker_crashes_or_is_suspended_or_wakes(self, worker: int, crashes: bool) -> None:
        if crashes:
            self._world.workers[worker].crash()
        else:
            self._world.workers[worker].is_suspended ^= True

    @rule(worker=workers, times=st.integers(1, 6))
    def worker_dies_of_what_it_leases(self, worker: int, times: int) -> None:
        for _ in range(times):
            self._world.die_of_a_command(worker)

    @rule(what=st.sampled_from(ODD), pick=numbers)
    def something_odd_happens(self, what: str, pick: int) -> None:
        world = self._world
        match what:
            case "message lost" if world.wire:
                del world.wire[pick % len(world.wire)]
            case "message repeated" if world.wire:
                world.wire.append(world.wire[pick % len(world.wire)])
            case "lease over" | "leases over":
                world.lapse(pick, all_of_them=what == "leases over")
            case "commands given back":
                world.give_back(pick)
            case "epoch closed":
                world.barrier()
            case "started again":
                world.start(world.execution_ids[pick % len(world.execution_ids)])
            case "completion forged":
                world.forge(pick)
            case "command row lost":
                world.lose_row(pick)

    # People and time

    @rule(what=st.sampled_from(ASKED), pick=numbers, twice=st.booleans())
    def somebody_asks_for_something(self, what: str, pick: int, twice: bool) -> None:
        world = self._world
        execution_id = self._execution(pick, MATTERS_TO.get(what, ALL))
        if what == "paused":
            world.tell(Pause(execution_id=execution_id), twice=twice)
        elif what == "resumed":
            world.tell(Resume(execution_id=execution_id), twice=twice)
        elif what == "cancelled" and self.is_meddled_with:
            world.tell(Cancel(execution_id=execution_id, reason="asked for"), twice=twice)
        elif what == "forked" and self.is_meddled_with:
            world.fork(execution_id, pick)
        elif self.is_meddled_with:
            steps = list(world.database.ledger(execution_id).state.steps)
            step = steps[pick % len(steps)] if steps and what == "begun at a step" else None
            items: Literal["failed", "all"] = "all" if what == "retried whole" else "failed"
            retry = Retry(execution_id=execution_id, step=step, items=items)
            world.tell(retry, twice=twice)

    @precondition(lambda self: self.world is not None and self.is_meddled_with)
    @rule(pick=numbers, times=st.integers(2, 3), rounds=st.integers(1, 3))
    def somebody_tries_again_and_again(self, pick: int, times: int, rounds: int) -> None:
        """A loop that goes on with one that went on with another."""
        for _ in range(times):
            execution_id = self._execution(pick, ENDED_EARLY)
            self._world.tell(Retry(execution_id=execution_id), twice=False)
            self.all_is_well_for_a_while(rounds)

    @precondition(lambda self: self.world is not None and self.is_meddled_with)
    @rule(
        pick=numbers,
        by=st.sampled_from((*APPROVERS, "eve")),
        approved=st.integers(0, 3),
        twice=st.booleans(),
    )
    def signal_comes(self, pick: int, by: str, approved: int, twice: bool) -> None:
        """Mostly one that is waited for."""
        world = self._world
        awaited = world.awaited_signals()
        if awaited and pick % 4:
            execution_id, name = awaited[pick % len(awaited)]
        else:
            execution_id, name = self._execution(pick, ALL), SIGNALS[pick % len(SIGNALS)]
        world.tell(world.signal(execution_id, name, by=by, approved=approved > 0), twice=twice)

    @precondition(lambda self: self.world is not None and self.world.database.timers_of_old)
    @rule(pick=numbers, is_set=st.booleans(), times=st.integers(1, 2), at_once=st.booleans())
    def timer_fires(self, pick: int, is_set: bool, times: int, at_once: bool) -> None:
        """Early or late, once or twice; what only waits may go on in any case.

        At once: in the turn in which the broker hears of work that was done at the last moment.
        """
        world = self._world
        timers = sorted(world.database.timers) if is_set else world.database.timers_of_old
        if at_once:
            self.worker_works(0, 4, 4, "what is done")
        for _ in range(times if timers else 0):
            world.fire(timers[pick % len(timers)], meddling=self.is_meddled_with)
        if at_once:
            world.advance(world.letters())

    def _execution(self, pick: int, statuses: frozenset[str]) -> ExecutionId:
        ledgers = self._world.database.ledgers
        fitting = [e for e, ledger in ledgers.items() if ledger.state.status in statuses]
        known = fitting if fitting and pick % 8 else list(ledgers) or self._world.execution_ids
        return known[pick % len(known)]

    # What must hold

    @invariant()
    def rows_and_memory_are_what_the_log_says(self) -> None:
        if self.world is not None:
            self.world.check()

    def teardown(self) -> None:
        # After a failure there is nothing to go on with, and another would only hide it.
        if self.world is not None and sys.exc_info()[0] is None:
            self.world.finish()
            self.world.check_end()
            Simulation.cases += any(self.world.plan.throws)

    @property
    def _world(self) -> World:
        assert self.world is not None
        return self.world


def simulate(cases: int, first_seed: int) -> int:
    """Run at least that many cases; how many there were."""
    Simulation.cases = 0
    how = settings(
        max_examples=BATCH,
        stateful_step_count=STEPS,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    with in_memory():
        for number in itertools.count(first_seed):
            if Simulation.cases >= cases:
                return Simulation.cases
            factory = cast("type[Simulation]", seed(number)(new_case))
            run_state_machine_as_test(factory, settings=how)
    raise AssertionError("unreachable")


def new_case() -> Simulation:
    """Hypothesis reads the source of what it is given in each run: this is shorter than a class."""
    return Simulation()


def test_some_hundred_random_cases_end_as_they_must() -> None:
    cases = simulate(QUICK_CASES, SEED)

    print(f"{cases} cases")
    assert cases >= QUICK_CASES


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_thousand_random_cases_end_as_they_must() -> None:
    share = math.ceil(FULL_CASES / SHARES)
    seeds = [(SEED + number) * 1_000_000 for number in range(SHARES)]
    with ProcessPoolExecutor(SHARES) as pool:
        cases = sum(pool.map(simulate, [share] * SHARES, seeds))

    print(f"{cases} cases")
    assert cases >= FULL_CASES
