"""Stacks start one after the other, also those of other test processes on this machine.

A stack looks which ports are free and listens on them some seconds later: two that look at the same
time could choose the same one.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK = Path(tempfile.gettempdir()) / f"noetl-tests-{os.getuid()}.lock"
_WAIT_SECONDS_MAX = 60.0
"""Somebody whose stack does not come up must not keep all others waiting."""


@contextmanager
def one_at_a_time() -> Iterator[None]:
    with _LOCK.open("a") as file:
        deadline = time.monotonic() + _WAIT_SECONDS_MAX
        while not _is_ours(file.fileno()) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield


def _is_ours(file: int) -> bool:
    """From then on until the file is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
