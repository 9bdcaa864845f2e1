"""Real `noetl` commands in processes of their own."""

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import pytest

from noetl_cli.main import main
from support.starting import one_at_a_time

NOETL = (sys.executable, "-m", "noetl_cli")
READY_SECONDS = 90.0
STOP_SECONDS = 120.0

T = TypeVar("T")


class Answer(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def noetl(
    *arguments: str | Path, url: str = "", home: Path | None = None, **environ: str
) -> Answer:
    """A command that ends by itself, in this process: most of its time would be the imports.

    Without `url` it finds only what `home` knows of.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", ["noetl", *map(str, arguments)]),
        patch.dict(os.environ, _environ(_whereabouts(url, home) | environ), clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    code = ended.value.code
    return Answer(code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())


def noetl_process(
    *arguments: str | Path, url: str = "", home: Path | None = None, **environ: str
) -> Answer:
    """The same in a process of its own, as a user has it."""
    ended = subprocess.run(
        [*NOETL, *map(str, arguments)],
        env=_environ(_whereabouts(url, home) | environ),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    return Answer(ended.returncode, ended.stdout, ended.stderr)


class DevStack:
    """A `noetl dev` that is running (or was killed)."""

    def __init__(self, process: subprocess.Popen[str], data_dir: Path) -> None:
        self.process = process
        self.data_dir = data_dir

    @property
    def url(self) -> str:
        url: str = self.info()["url"]
        return url

    def ps(self) -> dict[str, int]:
        answer = noetl("dev", "ps", "--json", "--data-dir", self.data_dir)
        parts = json.loads(answer.stdout or "[]")
        return {part["name"]: part["pid"] for part in parts}

    def metrics(self) -> dict[str, str | None]:
        answer = noetl("dev", "ps", "--json", "--data-dir", self.data_dir)
        return {part["name"]: part["metrics"] for part in json.loads(answer.stdout)}

    def recorded(self) -> dict[str, int]:
        """The same without a process of its own: for questions about moments."""
        state = json.loads((self.data_dir / "dev.json").read_text())
        return {part["name"]: part["pid"] for part in state["parts"]}

    def info(self) -> dict[str, Any]:
        answer = noetl("dev", "info", "--json", "--data-dir", self.data_dir)
        assert answer.returncode == 0, answer.stderr
        places: dict[str, Any] = json.loads(answer.stdout)
        return places

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(STOP_SECONDS)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_SECONDS)


@contextlib.contextmanager
def dev_stack(
    data_dir: Path, *options: str, command: tuple[str, ...] = NOETL, **popen: Any
) -> Iterator[DevStack]:
    environ = _environ(popen.pop("environ", {}))
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as at_the_end:
        errors_file = data_dir.parent / f"{data_dir.name}.err"
        errors = at_the_end.enter_context(errors_file.open("w+"))
        with one_at_a_time():
            process = subprocess.Popen(
                [*command, "dev", "--data-dir", str(data_dir), *options],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environ,
                **popen,
            )
            at_the_end.callback(_end, process)
            assert process.stdout is not None
            line = process.stdout.readline()
        errors.seek(0)
        assert line.startswith("ready: http://127.0.0.1:"), errors.read()
        yield DevStack(process, data_dir)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        process.wait(STOP_SECONDS)


def eventually(question: Callable[[], T | None], *, seconds: float) -> T:
    """The first answer that is not None or empty."""
    deadline = time.monotonic() + seconds
    while True:
        answer = question()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


def _whereabouts(url: str, home: Path | None) -> dict[str, str]:
    nowhere = {"XDG_DATA_HOME": str(home or "/nonexistent")}
    return nowhere | ({"NOETL_URL": url} if url else {})


def _environ(extra: Mapping[str, str]) -> dict[str, str]:
    """Ours, without what would lead a command to somebody else's NoETL."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NOETL_")}
    return kept | {"COLUMNS": "200"} | dict(extra)
