"""How much of the machine was somebody else's, while figures were held against a bound."""

import time

import psutil

SHARE_MAX = 0.5
"""More than that excuses no more."""


class Others:
    """From here on. What the tests have started is theirs; time that a hypervisor gave to another
    machine is not."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._busy, self._own = _busy_seconds(), _own_seconds()

    def share(self) -> float:
        """Of all processors, between 0 and 1."""
        theirs = (_busy_seconds() - self._busy) - (_own_seconds() - self._own)
        whole = (time.monotonic() - self._began) * (psutil.cpu_count() or 1)
        return min(1.0, max(0.0, theirs / whole))

    def slowness(self) -> float:
        """How much longer something may take that needs all processors: 1 where we were alone."""
        return 1 / (1 - min(SHARE_MAX, self.share()))


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return float(sum(times) - idle - guests)  # guests are counted in user and nice already


def _own_seconds() -> float:
    """Of this process and all below it, also of those that have ended."""
    this = psutil.Process()
    return sum(_seconds_of(one) for one in (this, *this.children(recursive=True)))


def _seconds_of(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)
