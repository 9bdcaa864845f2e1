"""When a turn has to wait for the next events, and when it must not."""

import asyncio
import itertools
import time

import pytest

from noetl_projection.pace import HURRY_SECONDS, Pace

WINDOW_SECONDS = 0.8
SOON = pytest.approx(0, abs=WINDOW_SECONDS / 2)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def paused_seconds(pace: Pace, *, in_a_hurry: bool = False) -> float:
    urgent = asyncio.Event()
    if in_a_hurry:
        urgent.set()
    began = time.monotonic()
    await pace.pause(unless=urgent)
    return time.monotonic() - began


async def test_the_first_event_after_a_quiet_moment_is_not_kept_waiting() -> None:
    pace = Pace(WINDOW_SECONDS)

    assert await paused_seconds(pace) == SOON
    await asyncio.sleep(WINDOW_SECONDS)
    assert await paused_seconds(pace) == SOON


async def test_turns_that_follow_each_other_closely_begin_a_window_apart() -> None:
    pace = Pace(WINDOW_SECONDS)
    began = []
    for busy_share in (0.1, 0.5, 0.9):
        await paused_seconds(pace)
        began.append(time.monotonic())
        await asyncio.sleep(WINDOW_SECONDS * busy_share)

    gaps = [later - earlier for earlier, later in itertools.pairwise(began)]
    assert min(gaps) >= WINDOW_SECONDS * 0.99


async def test_turns_made_in_a_hurry_do_not_put_off_the_next_one() -> None:
    pace = Pace(WINDOW_SECONDS)
    hurried = [await paused_seconds(pace, in_a_hurry=True) for _turn in range(50)]

    assert sum(hurried) == SOON
    assert await paused_seconds(pace) < 2 * WINDOW_SECONDS


def test_wake_ups_after_a_barrier_are_in_a_hurry_for_a_while() -> None:
    clock = Clock()
    pace = Pace(WINDOW_SECONDS, clock)
    seen = [pace.is_hurried]
    pace.hurry()
    for part in (0.9, 0.2):
        clock.now += HURRY_SECONDS * part
        seen.append(pace.is_hurried)

    assert seen == [False, True, False]
