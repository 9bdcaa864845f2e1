"""Commands from playbooks, run by real shells."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from noetl_worker.tools.shell import CHILD, OUTPUT_BYTES_MAX, ShellTool
from services.worker import calls


@pytest.fixture
def tool() -> ShellTool:
    return ShellTool(memory_mb=1024, cpu_seconds=60)


@pytest.mark.parametrize(
    ("config", "stdout"),
    [
        ({"command": "echo a; echo b"}, "a\nb\n"),
        ({"command": ["echo", "a b", "$HOME", 7, True]}, "a b $HOME 7 true\n"),
        ({"cmds": ["x=1; cd /", 'echo "$x $PWD"']}, "1 /\n"),
        ({"cmds": ["cat <<END\nit's\nEND", "echo b"]}, "it's\nb\n"),
        ({"command": "echo $A $B $C-", "env": {"A": 1, "B": [True], "C": None}}, "1 [true] -\n"),
        ({"command": "pwd", "cwd": "/"}, "/\n"),
        ({"command": "cat"}, ""),
        ({"command": "yes | head -n 1"}, "y\n"),
    ],
)
async def test_a_command_prints(tool: ShellTool, config: dict[str, Any], stdout: str) -> None:
    found = await calls.data(tool, config=config)

    assert found == {"stdout": stdout, "stderr": "", "exit_code": 0}


async def test_a_failing_command_is_an_error_with_what_it_said(tool: ShellTool) -> None:
    command = "echo out; echo first >&2; echo last >&2; exit 3"

    result = await calls.run(tool, config={"command": command})

    assert result.data == {"stdout": "out\n", "stderr": "first\nlast\n", "exit_code": 3}
    assert result.error is not None
    assert (result.error.kind, result.error.code) == ("shell_error", "3")
    assert result.error.message == "the command ended with exit code 3: last"
    assert result.error.details == {
        "exit_code": 3, "stdout": "out\n", "stderr": "first\nlast\n",
    }  # fmt: skip


@pytest.mark.parametrize("failing", ["false", "false && true", "(exit 4)", "nope_not_there"])
async def test_commands_stop_at_the_first_that_fails(tool: ShellTool, failing: str) -> None:
    result = await calls.run(tool, config={"cmds": ["echo one", failing, "echo two"]})

    assert result.error is not None
    assert result.data["stdout"] == "one\n"


async def test_a_signal_is_named(tool: ShellTool) -> None:
    failed = await calls.error(tool, config={"command": "kill -TERM $$"})

    assert (failed.code, failed.details["signal"]) == ("143", "SIGTERM")
    assert "SIGTERM" in failed.message


async def test_a_program_that_is_not_there_is_said(tool: ShellTool) -> None:
    failed = await calls.error(tool, config={"command": ["nope_not_there", "x"]})

    assert failed.code == "127"
    assert "nope_not_there" in failed.message


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"command": " "}, "`command` must be a text"),
        ({"command": []}, "`command` must be a text"),
        ({"cmds": []}, "`cmds` must be a list"),
        ({"command": ["echo", None]}, "`command` has an empty value"),
        ({"command": "x" * 200_000}, "`command` cannot be started"),
        ({"command": "a\x00b"}, "`command` cannot be started"),
        ({"command": "true", "env": ["A"]}, "`env` must be a mapping"),
        ({"command": "true", "env": {"A=B": 1}}, "cannot be called 'A=B'"),
        ({"command": "true", "cwd": "/not/there"}, "`cwd` is no directory"),
    ],
)
async def test_a_wrong_field_is_named(
    tool: ShellTool, config: dict[str, Any], problem: str
) -> None:
    failed = await calls.error(tool, config=config)

    assert failed.code == "WRONG_FIELD"
    assert problem in failed.message


async def test_endless_output_is_cut_and_never_blocks_the_command(tool: ShellTool) -> None:
    command = "head -c 5000000 /dev/zero | tr '\\0' x; echo end; echo oh >&2"

    found = await calls.data(tool, config={"command": command})

    assert len(found["stdout"]) < OUTPUT_BYTES_MAX + 100
    assert found["stdout"].endswith(f"... {5_000_004 - OUTPUT_BYTES_MAX} more bytes")
    assert found["stderr"] == "oh\n"


async def test_the_environment_holds_no_secret(
    tool: ShellTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NOETL_POSTGRES_DSN", "AWS_SECRET_ACCESS_KEY", "MY_TOKEN"):
        monkeypatch.setenv(name, "hunter2")

    found = await calls.data(tool, config={"command": "env"})

    assert "hunter2" not in found["stdout"]
    assert "PATH=" in found["stdout"]


async def test_a_command_has_a_directory_of_its_own_that_goes_with_it(tool: ShellTool) -> None:
    command = {"command": "touch left; pwd; ls $HOME"}

    first = (await calls.data(tool, config=command))["stdout"].split()
    second = (await calls.data(tool, config=command))["stdout"].split()

    assert first[0] != second[0]
    assert first[1] == second[1] == "left"
    assert not await asyncio.to_thread(Path(first[0]).exists)


async def test_what_a_command_leaves_running_dies_with_it(tool: ShellTool) -> None:
    command = (
        "sleep 62.5 & setsid sleep 62.5 & (setsid sh -c 'sleep 62.5 & sleep 62.5' &) ; echo ok"
    )
    started = time.monotonic()

    found = await calls.data(tool, config={"command": command})

    assert found["stdout"] == "ok\n"
    assert running("62.5") == []
    assert time.monotonic() - started < 30


async def test_a_late_command_dies_with_everything_it_started(tool: ShellTool) -> None:
    command = "setsid sleep 63.5 & trap '' TERM INT HUP; sleep 63.5; sleep 63.5"
    started = time.monotonic()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await calls.run(tool, config={"command": command})

    assert running("63.5") == []
    assert time.monotonic() - started < 30


async def test_a_command_dies_with_its_worker() -> None:
    # What stands between: its stdin ends when the worker is gone, however it went.
    reading, writing = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", str(CHILD), "0", "0", "/", "--", "/bin/sh", "-c",
        "setsid sleep 64.5 & sleep 64.5; true",
        stdin=reading,
    )  # fmt: skip
    os.close(reading)
    while len(running("64.5")) < 3:  # noqa: ASYNC110 - another process says nothing
        await asyncio.sleep(0.02)

    os.close(writing)
    returncode = await asyncio.wait_for(process.wait(), 30)

    assert returncode == -signal.SIGKILL
    assert running("64.5") == []


async def test_processor_time_is_bounded() -> None:
    failed = await calls.error(
        ShellTool(memory_mb=0, cpu_seconds=1), config={"command": "while :; do :; done"}
    )

    assert failed.details["signal"] == "SIGXCPU"


async def test_memory_is_bounded() -> None:
    small = ShellTool(memory_mb=100, cpu_seconds=60)
    code = "x = bytearray(200 * 1024**2)"

    failed = await calls.error(small, config={"command": [sys.executable, "-c", code]})

    assert "MemoryError" in failed.message


def running(mark: str) -> list[int]:
    """Living processes with this text in their command line; a dead one may wait to be reaped."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if any(mark in word for word in process.info["cmdline"] or ())
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]
