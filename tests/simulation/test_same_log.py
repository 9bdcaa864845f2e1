"""However the work is spread and however messages travel, the log says the same.

A random playbook in which order decides nothing is run by one worker and by eight, with every
message taken by itself and with all of them in one batch, over NATS and without it. Each event has
a natural key: the runs must record the same keys, each as often as the others.
"""

import random
from collections.abc import Iterator

import pytest

from noetl_core.domain.events import LoopDone, StepAborted, StepFailed
from simulation.test_simulation import SEED
from support.memory_database import in_memory
from support.playbooks import THROWS, Plan, plan_of
from support.world import Road, World

QUICK_PLAYBOOKS = 25
MANY_PLAYBOOKS = 500
EVENTS_MIN = 15
"""With fewer there is hardly anything that order could change."""

WAYS: tuple[tuple[int, bool, Road], ...] = (
    (1, False, "wire"),
    (8, False, "wire"),
    (1, True, "wire"),
    (8, True, "inbox"),
    (2, False, "inbox"),
)
"""How many workers, whether letters are taken one by one, and how they come."""


def run(plan: Plan, workers: int, one_by_one: bool, road: Road) -> World:
    world = World(plan, workers=workers, road=road)
    world.finish(one_by_one=one_by_one)
    world.check_end()
    return world


def order_decides(world: World) -> bool:
    """Whether something was given up while other work was under way: then order decides what of
    that was still recorded."""
    facts = [event.fact for ledger in world.database.ledgers.values() for event in ledger.events]
    ends = [ledger.state.status for ledger in world.database.ledgers.values()]
    gave_up = any(isinstance(fact, LoopDone) and fact.status == "error" for fact in facts)
    failed = any(isinstance(fact, StepFailed) and not fact.handled for fact in facts)
    aborted = any(isinstance(fact, StepAborted) for fact in facts)
    return gave_up or failed or aborted or set(ends) != {"COMPLETED"}


def plans_without_races(seed: int) -> Iterator[tuple[Plan, World]]:
    throws = random.Random(seed)
    while True:
        plan = plan_of(throws.randbytes(THROWS))
        if plan.is_confluent:
            world = run(plan, *WAYS[0])
            if len(world.database.log) >= EVENTS_MIN and not order_decides(world):
                yield plan, world


def compare(playbooks: int, seed: int) -> None:
    with in_memory():
        for _, (plan, first) in zip(range(playbooks), plans_without_races(seed), strict=False):
            for way in WAYS[1:]:
                other = run(plan, *way)
                assert other.keys() == first.keys(), (way, plan.throws)


def test_the_same_events_are_recorded_however_the_work_is_spread() -> None:
    compare(QUICK_PLAYBOOKS, SEED)


@pytest.mark.slow
def test_the_same_events_are_recorded_for_hundreds_of_playbooks() -> None:
    compare(MANY_PLAYBOOKS, SEED * 1_000)
