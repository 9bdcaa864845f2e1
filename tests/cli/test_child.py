"""A program under supervision: its log, its end, and what it says when it does not start."""

import asyncio
import signal
import sys
from pathlib import Path

import psutil
import pytest

from noetl_cli.failure import CommandFailed
from noetl_cli.stack import child as child_module
from noetl_cli.stack.child import Child
from noetl_cli.stack.program import Program


def program(code: str, **fields: float) -> Program:
    async def never() -> bool:
        return False

    return Program(
        name="part",
        command=(sys.executable, "-uc", code),
        environment={},
        is_ready=never,
        **fields,  # type: ignore[arg-type]
    )


async def test_one_that_dies_instead_of_serving_is_quoted(tmp_path: Path) -> None:
    child = Child(program("print('the disk is full'); raise SystemExit(7)"), tmp_path)
    await child.start()

    with pytest.raises(CommandFailed, match="part did not start") as failed:
        await child.ready()

    assert "the disk is full" in str(failed.value)
    assert str(child.log_file) in str(failed.value)
    assert await child.ended() == 7
    assert "exit code 7" in child.obituary(7)
    assert "the disk is full" in child.obituary(7)


async def test_one_that_does_not_end_in_time_is_killed(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf'); time.sleep(60)"
    child = Child(program(deaf, stop_seconds=0.2), tmp_path)
    await child.start()
    while "deaf" not in child.log_file.read_text():
        assert child.is_running

    await child.stop()

    assert not child.is_running
    assert "signal SIGKILL" in child.obituary(-signal.SIGKILL)


async def test_a_log_is_cut_at_its_bound_and_the_program_writes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "LOG_BYTES_MAX", 100)
    endless = "import time\nwhile True:\n    print('x' * 50); time.sleep(0.01)"
    child = Child(program(endless), tmp_path)
    await child.start()
    while child.log_file.stat().st_size <= 200:
        assert child.is_running

    assert child.record is not None
    asleep = psutil.Process(child.record.pid)
    asleep.suspend()  # else it may have written as much again before we look
    while asleep.status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110 - a process tells nobody
        await asyncio.sleep(0.01)

    child.bound_log()

    assert child.log_file.with_suffix(".log.1").stat().st_size > 200
    assert child.log_file.stat().st_size == 0
    asleep.resume()
    while not child.log_file.read_bytes().startswith(b"x"):
        assert child.is_running
    await child.stop()
