"""When a turn has to wait for the next events, and when it must not."""

import itertools

from noetl_projection.pace import HURRY_SECONDS, Pace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_first_event_after_a_quiet_moment_is_not_kept_waiting() -> None:
    clock = Clock()
    pace = Pace(0.02, clock)

    assert pace.pause_seconds() == 0
    clock.now += 0.02
    assert pace.pause_seconds() == 0


def test_turns_that_follow_each_other_closely_begin_a_window_apart() -> None:
    clock = Clock()
    pace = Pace(0.02, clock)
    began = []
    for busy in (0.001, 0.005, 0.019, 0.030, 0.002):
        clock.now += pace.pause_seconds()
        began.append(clock.now)
        clock.now += busy

    gaps = [round(b - a, 6) for a, b in itertools.pairwise(began)]
    assert gaps == [0.02, 0.02, 0.02, 0.03]


def test_wake_ups_after_a_barrier_are_in_a_hurry_for_a_while() -> None:
    clock = Clock()
    pace = Pace(0.02, clock)
    seen = [pace.is_hurried]
    pace.hurry()
    for part in (0.9, 0.2):
        clock.now += HURRY_SECONDS * part
        seen.append(pace.is_hurried)

    assert seen == [False, True, False]
