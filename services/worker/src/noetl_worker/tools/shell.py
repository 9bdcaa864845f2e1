"""`shell`: runs a command in a process of its own, away from the worker's secrets.

A text goes to /bin/sh, a list is a program and its arguments without a shell. `cmds` are run one
after the other in one shell, until one fails. When the command has ended, is late or is cancelled,
everything that it started is killed (children/shell_child.py).
"""

import asyncio
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog

from noetl_core.domain.errors import ToolError
from noetl_worker.children.pool import child_environment
from noetl_worker.tools.tool import ToolCall, ToolResult, wrong_field

CHILD = Path(__file__).parents[1] / "children" / "shell_child.py"
SHELL = "/bin/sh"
OUTPUT_BYTES_MAX = 1024 * 1024
TAIL_BYTES_MAX = 1024
STOP_SECONDS_MAX = 5.0
_READ_BYTES = 64 * 1024

log = structlog.get_logger()


class ShellTool:
    kind = "shell"

    def __init__(self, *, memory_mb: int, cpu_seconds: int) -> None:
        self._limits = (str(memory_mb), str(cpu_seconds))

    async def run(self, call: ToolCall) -> ToolResult:
        command, given = _command(call.config), _environment(call.config)
        with tempfile.TemporaryDirectory(prefix="noetl-shell-", ignore_cleanup_errors=True) as home:
            directory = _directory(call.config, home)
            process = await self._start(command, directory, child_environment(home) | given)
            ended = await _finish(process)
        return ended.result

    async def _start(
        self, command: list[str], directory: str, environment: dict[str, str]
    ) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(CHILD), *self._limits, directory, "--", *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
                cwd="/",
                start_new_session=True,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            # The system takes 128 KiB in one argument, and no NUL.
            reason = getattr(error, "strerror", None) or str(error)
            raise wrong_field("command", f"cannot be started: {reason}") from error

    async def close(self) -> None:
        pass


class Ended(NamedTuple):
    returncode: int
    stdout: "Output"
    stderr: "Output"

    @property
    def exit_code(self) -> int:
        """Of a command that a signal ended, what a shell would say."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    @property
    def result(self) -> ToolResult:
        data = {
            "stdout": self.stdout.text,
            "stderr": self.stderr.text,
            "exit_code": self.exit_code,
        }
        return ToolResult(data, error=None if self.returncode == 0 else self._error())

    def _error(self) -> ToolError:
        details: dict[str, Any] = {
            "exit_code": self.exit_code,
            "stdout": self.stdout.tail,
            "stderr": self.stderr.tail,
        }
        how = f"ended with exit code {self.exit_code}"
        if self.returncode < 0:
            details["signal"] = signal.Signals(-self.returncode).name
            how = f"was ended by {details['signal']}"
        lines = self.stderr.tail.split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ToolError(
            kind="shell_error",
            code=str(self.exit_code),
            message=f"the command {how}" + (f": {last}" if last else ""),
            details=details,
        )


class Output:
    """What was printed: its beginning up to a limit, and its end. Reading never stops."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = b""
        self._length = 0

    async def read(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        while piece := await stream.read(_READ_BYTES):
            self._length += len(piece)
            self._head += piece[: OUTPUT_BYTES_MAX - len(self._head)]
            self._tail = (self._tail + piece)[-TAIL_BYTES_MAX:]

    @property
    def text(self) -> str:
        lost = self._length - len(self._head)
        return _text(bytes(self._head)) + (f"\n... {lost} more bytes" if lost else "")

    @property
    def tail(self) -> str:
        return _text(self._tail)


def _text(output: bytes) -> str:
    return output.decode(errors="replace")


async def _finish(process: asyncio.subprocess.Process) -> Ended:
    stdout, stderr = Output(), Output()
    try:
        await asyncio.gather(stdout.read(process.stdout), stderr.read(process.stderr))
        return Ended(await process.wait(), stdout, stderr)
    except BaseException:
        # Also when we are cancelled: what the command does must not go on behind our back.
        await asyncio.shield(_stop(process))
        raise


async def _stop(process: asyncio.subprocess.Process) -> None:
    """The process between us and the command kills everything when its stdin ends."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), STOP_SECONDS_MAX)
    except TimeoutError:
        log.warning("shell.not_stopped", pid=process.pid)
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _command(config: Mapping[str, Any]) -> list[str]:
    commands = config.get("cmds")
    if commands is not None:
        if isinstance(commands, str):
            commands = [commands]
        if not isinstance(commands, list) or not commands:
            raise wrong_field("cmds", "must be a list of commands")
        # `set -e` would go on after `false && true`.
        lines = [f"eval {shlex.quote(_as_text(each, 'cmds'))} || exit $?" for each in commands]
        return [SHELL, "-c", "\n".join(lines)]
    command = config.get("command")
    if isinstance(command, list) and command:
        return [_as_text(argument, "command") for argument in command]
    if not isinstance(command, str) or not command.strip():
        raise wrong_field("command", "must be a text for the shell, or a program and its arguments")
    return [SHELL, "-c", command]


def _environment(config: Mapping[str, Any]) -> dict[str, str]:
    """The command's own variables; one that is null is not set."""
    given = config.get("env") or {}
    if not isinstance(given, Mapping):
        raise wrong_field("env", f"must be a mapping, not {type(given).__name__}")
    for name in given:
        if not name or "=" in name or "\x00" in name:
            raise wrong_field("env", f"has a variable that cannot be called {name!r}")
    return {name: _as_text(value, "env") for name, value in given.items() if value is not None}


def _directory(config: Mapping[str, Any], home: str) -> str:
    directory = config.get("cwd")
    if directory is None:
        return home
    if not isinstance(directory, str) or not Path(directory).is_dir():
        raise wrong_field("cwd", f"is no directory of this worker: {directory}")
    return str(Path(directory).absolute())


def _as_text(value: Any, field: str) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        raise wrong_field(field, "has an empty value in it")
    return msgspec.json.encode(value).decode()
