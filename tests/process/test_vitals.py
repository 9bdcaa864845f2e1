"""process/vitals.py: how heartbeats went, as the next one tells it."""

from contextlib import suppress

import pytest

from noetl_core.process.vitals import Vitals
from support.clock import FakeClock


def test_a_heartbeat_that_failed_lowers_the_rate_of_success() -> None:
    clock = FakeClock()
    vitals = Vitals(clock)
    with vitals.beat():
        clock.advance(0.25)
    for _ in range(2):
        with suppress(ConnectionError), vitals.beat():
            clock.advance(5)
            raise ConnectionError
    with vitals.beat():
        said = vitals.report()

    assert said["heartbeat_success_rate"] == pytest.approx(1 / 3, abs=1e-6)
    assert said["heartbeat_latency_ms"] == 250


def test_the_first_heartbeat_has_nothing_to_say_of_others() -> None:
    vitals = Vitals()
    with vitals.beat():
        said = vitals.report()

    assert set(said) == {"process_cpu_percent", "process_memory_peak_bytes"}
    assert said["process_memory_peak_bytes"] > 1_000_000
