"""One program that runs: start it, know when it ended, end it. Its output goes to a log file."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from asyncio.subprocess import Process
from pathlib import Path

from noetl_cli.failure import CommandFailed
from noetl_cli.stack.preload import GO
from noetl_cli.stack.processes import ProcessRecord, dying_with_parent, record_of
from noetl_cli.stack.program import Program

LOG_BYTES_MAX = 32 * 1024 * 1024
READY_SECONDS_MAX = 300.0
"""Postgres may have gigabytes of its log to replay after a crash."""

_READY_POLL_SECONDS = 0.05
_LOG_TAIL_LINES = 15
_LOG_TAIL_BYTES = 64 * 1024
_LAST_WORDS_MAX = 300


class Child:
    def __init__(self, program: Program, logs: Path) -> None:
        self.program = program
        self.log_file = logs / f"{program.name}.log"
        self.record: ProcessRecord | None = None
        self._process: Process | None = None

    @property
    def name(self) -> str:
        return self.program.name

    async def start(self) -> None:
        program = self.program
        await program.prepare()
        account = program.account
        with self.log_file.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *program.command,
                stdin=subprocess.PIPE if program.waits_for_go else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(program.environment),
                cwd=None if account is None else "/",
                user=None if account is None else account.uid,
                group=None if account is None else account.gid,
                extra_groups=None if account is None else [],
                # A session of its own: Ctrl-C in the terminal reaches the supervisor alone, which
                # then ends its children in order.
                start_new_session=True,
                preexec_fn=dying_with_parent(program.discard_signal),
            )
        self.record = record_of(program.name, self._process.pid)

    def go(self) -> None:
        """Whatever it waited for is there."""
        assert self._process is not None, self.name
        if self._process.stdin is not None:
            self._process.stdin.write(GO)
            self._process.stdin.close()

    async def ready(self) -> None:
        """Wait until it serves; if it dies or hangs instead, say what its log says."""
        try:
            async with asyncio.timeout(READY_SECONDS_MAX):
                while not await self.program.is_ready():
                    if not self.is_running:
                        raise CommandFailed(f"{self.name} did not start.\n{self.log_tail()}")
                    await asyncio.sleep(_READY_POLL_SECONDS)
        except TimeoutError:
            raise CommandFailed(
                f"{self.name} was not ready after {READY_SECONDS_MAX:.0f} s.\n{self.log_tail()}"
            ) from None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def ended(self) -> int:
        """Wait for its end: exit code, or minus the signal. What it had started goes with it."""
        assert self._process is not None, self.name
        code = await self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.record = None
        return code

    async def stop(self, *, is_discarded: bool = False) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        program = self.program
        self._send(program.discard_signal if is_discarded else program.stop_signal)
        try:
            async with asyncio.timeout(program.stop_seconds):
                await self.ended()
        except TimeoutError:
            self._send(signal.SIGKILL)
            await self.ended()

    def log_tail(self) -> str:
        return "\n".join([*self._log_lines()[-_LOG_TAIL_LINES:], f"(all of it: {self.log_file})"])

    def obituary(self, code: int) -> str:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        lines = self._log_lines()
        words = f" Its last words: {lines[-1][:_LAST_WORDS_MAX]}" if lines and code > 0 else ""
        return f"{self.name} ended ({how}).{words}"

    def _log_lines(self) -> list[str]:
        try:
            with self.log_file.open("rb") as log:
                log.seek(max(log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES, 0))
                return log.read().decode(errors="replace").splitlines()
        except OSError:
            return []

    def bound_log(self) -> None:
        """Keep one older piece. The program appends, so after the cut it goes on at the start."""
        with contextlib.suppress(FileNotFoundError):
            if self.log_file.stat().st_size > LOG_BYTES_MAX:
                shutil.copyfile(self.log_file, self.log_file.with_suffix(".log.1"))
                os.truncate(self.log_file, 0)

    def _send(self, number: int) -> None:
        assert self._process is not None, self.name
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
