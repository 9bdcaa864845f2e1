"""What the reaper shows: the numbers of whoever leads, and of nobody else."""

from collections.abc import Callable, Iterable, Iterator

import pytest
from opentelemetry.metrics import CallbackOptions, Observation

from noetl_core.store.postgres import Pool
from noetl_reaper import metrics
from noetl_reaper.count import QueueCount


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    metrics.show_nothing()
    yield
    metrics.show_nothing()


def values(gauge: Callable[[CallbackOptions], Iterable[Observation]]) -> list[float]:
    return [one.value for one in gauge(CallbackOptions())]


def test_a_queue_that_was_emptied_shows_a_zero() -> None:
    metrics.show_queue({("cpu", "pending"): 5, ("gpu", "leased"): 1})
    metrics.show_queue({("gpu", "leased"): 2})

    assert values(metrics._depth) == [0, 2]


def test_who_leads_shows_that_nothing_is_stuck() -> None:
    metrics.show_dead_letters({})

    assert values(metrics._stuck) == [0]


def test_who_leads_no_more_shows_nothing() -> None:
    metrics.show_queue({("cpu", "pending"): 5})
    metrics.show_dead_letters({"reaper": 3, "broker": 1})
    assert values(metrics._stuck) == [3]

    metrics.show_nothing()

    assert [values(one) for one in (metrics._depth, metrics._set_aside, metrics._stuck)] == [[]] * 3


async def test_a_queue_that_takes_long_to_count_is_counted_less_often(pool: Pool) -> None:
    # Every reading of this clock is a second after the last: a count takes one.
    times = iter(range(1000))
    count = QueueCount(pool, clock=lambda: float(next(times)))

    counted = [await count.turn(leads=True) for _ in range(120)]

    assert [turn for turn, did in enumerate(counted) if did] == [0, 50, 100]


async def test_a_count_that_hung_keeps_nobody_from_counting_again(pool: Pool) -> None:
    times = iter((0, 75, 80, 134, 136, 136))
    count = QueueCount(pool, clock=lambda: float(next(times)))

    counted = [await count.turn(leads=True) for _ in range(4)]

    assert counted == [True, False, False, True]


async def test_who_leads_again_shows_the_queue_at_once(pool: Pool) -> None:
    times = iter((0, 75, 80, 85, 86))
    count = QueueCount(pool, clock=lambda: float(next(times)))

    counted = [await count.turn(leads=leads) for leads in (True, False, True)]

    assert counted == [True, False, True]
