"""What a process says of itself with every heartbeat: how the last ones went, and what it uses."""

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024


class Vitals:
    """Counted from the start of the process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._beats = 0
        self._failures = 0
        self._latency_ms: float | None = None
        self._seen_at = clock()
        self._cpu_seconds = _cpu_seconds()

    @contextmanager
    def beat(self) -> Iterator[None]:
        """Around one heartbeat."""
        begun = self._clock()
        self._beats += 1
        try:
            yield
        except BaseException:
            self._failures += 1
            raise
        self._latency_ms = (self._clock() - begun) * 1000

    def report(self) -> dict[str, float]:
        """For the heartbeat that is about to be sent; so it tells of those before it."""
        said = {
            "process_cpu_percent": self._cpu_percent(),
            "process_memory_peak_bytes": float(_memory_peak_bytes()),
        }
        if self._latency_ms is not None:
            ended = max(1, self._beats - 1)
            said["heartbeat_latency_ms"] = round(self._latency_ms, 3)
            said["heartbeat_success_rate"] = round(1 - self._failures / ended, 6)
        return said

    def _cpu_percent(self) -> float:
        """Of one processor, since the last report."""
        now, used = self._clock(), _cpu_seconds()
        passed, spent = now - self._seen_at, used - self._cpu_seconds
        self._seen_at, self._cpu_seconds = now, used
        return round(100 * spent / passed, 2) if passed > 0 else 0.0


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _memory_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES
