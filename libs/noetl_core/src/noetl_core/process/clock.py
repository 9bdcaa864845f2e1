"""The clock that leases are measured with: it never goes back, and runs on while we sleep."""

import time

# CLOCK_MONOTONIC stands still while a virtual machine is suspended; a lease in Postgres does not.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def lease_clock() -> float:
    return time.clock_gettime(_CLOCK)


def unix_ms() -> int:
    return time.time_ns() // 1_000_000
