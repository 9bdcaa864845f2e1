"""Which processes are ours to end."""

import asyncio
import os
import signal
import sys

import msgspec
import pytest

from noetl_cli.stack.processes import dying_with_parent, end, is_alive, record_of


async def _sleeper() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec("sleep", "60")


async def test_a_recorded_process_is_ended() -> None:
    process = await _sleeper()
    record = record_of("sleeper", process.pid)

    assert await end(record, ask_with=signal.SIGTERM, grace_seconds=30)

    assert await process.wait() == -signal.SIGTERM
    assert not is_alive(record)


async def test_a_process_that_got_the_pid_later_is_left_alone() -> None:
    process = await _sleeper()
    record = record_of("sleeper", process.pid)
    earlier = msgspec.structs.replace(record, started=record.started - 60)
    try:
        assert not is_alive(earlier)
        assert not await end(earlier, ask_with=signal.SIGKILL, grace_seconds=1)
        assert is_alive(record)
    finally:
        process.kill()
        await process.wait()


async def test_one_that_does_not_listen_is_killed_after_its_grace() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-uc", _DEAF, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()
    record = record_of("deaf", process.pid)

    assert await end(record, ask_with=signal.SIGTERM, grace_seconds=0.2)

    assert await process.wait() == -signal.SIGKILL


_DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print()
time.sleep(60)
"""

_PARENT = """
import signal, subprocess, sys, time
from noetl_cli.stack.processes import dying_with_parent
child = subprocess.Popen(["sleep", "60"], preexec_fn=dying_with_parent(signal.SIGKILL))
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the wish to die with a parent is Linux's")
async def test_a_child_dies_with_a_parent_that_is_killed() -> None:
    assert dying_with_parent(signal.SIGKILL) is not None
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PARENT, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child = record_of("child", int(await parent.stdout.readline()))
    assert is_alive(child)

    os.kill(parent.pid, signal.SIGKILL)
    await parent.wait()

    async with asyncio.timeout(30):
        while is_alive(child):  # noqa: ASYNC110 - a process tells nobody that it died
            await asyncio.sleep(0.01)
