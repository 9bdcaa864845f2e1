"""Keeps what this process was told from the processes it starts for users.

Code of a playbook runs as the same user, so it could read /proc/<worker>/environ, and with it the
DSN and the key of the credentials. A process that is not dumpable has no such file for others. Root
can read it all the same: run workers as a user of their own.
"""

import ctypes
import sys

_PR_SET_DUMPABLE = 4


def hide_environment() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
