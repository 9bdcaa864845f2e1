"""Processes by what they really are: a pid is only ours together with the moment it started."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable

import msgspec
import psutil

_START_TOLERANCE_S = 2.0
"""The kernel's boot time, on which start times rest, moves a little when the clock is set."""

_PR_SET_PDEATHSIG = 1
_GONE_POLL_S = 0.02


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A process as it can be recognised later, after its pid may have gone to another."""

    name: str
    pid: int
    started: float


def record_of(name: str, pid: int) -> ProcessRecord:
    try:
        started = psutil.Process(pid).create_time()
    except psutil.Error:
        started = 0.0
    return ProcessRecord(name=name, pid=pid, started=started)


def is_alive(record: ProcessRecord) -> bool:
    return _find(record) is not None


async def end(record: ProcessRecord, *, ask_with: int, grace_seconds: float) -> bool:
    """End a leftover: politely, then not. False if it is gone already (or its pid another's)."""
    process = _find(record)
    if process is None:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(ask_with)
        if not await gone(process, grace_seconds):
            process.kill()
            await gone(process, grace_seconds)
    return True


async def gone(process: psutil.Process, seconds: float) -> bool:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while _is_running(process):
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(_GONE_POLL_S)
    return True


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _find(record: ProcessRecord) -> psutil.Process | None:
    try:
        process = psutil.Process(record.pid)
        started = process.create_time()
    except psutil.Error:
        return None
    is_same = abs(started - record.started) <= _START_TOLERANCE_S
    return process if is_same and _is_running(process) else None


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def dying_with_parent(death_signal: int) -> Callable[[], None]:
    """To run in a child before exec: the kernel sends it `death_signal` when its parent dies.

    It must run after the change of user, which forgets the wish. Elsewhere than on Linux the next
    supervisor of the data directory ends what is left, by its record.
    """
    parent = os.getpid()

    def before_exec() -> None:
        if _libc is None:
            return
        _libc.prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return before_exec
