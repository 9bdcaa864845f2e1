"""`noetl run`: its exit codes, its JSON, and where it runs."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from cli.stacks import NOETL, DevStack, dev_stack, eventually, noetl, noetl_process

HEAD = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: %(name)s, path: tests/%(name)s}
"""

GREET = (
    HEAD % {"name": "greet"}
    + """
workload: {who: world, tags: {a: 1}}
workflow:
  - step: greet
    tool:
      kind: python
      input: {who: "{{ workload.who }}", tags: "{{ workload.tags }}"}
      code: |
        result = {"text": "hello " + who, "tags": tags}
    next: {arcs: [{step: count}]}
  - step: count
    loop: {in: "{{ range(5) | list }}", iterator: number}
    tool:
      kind: python
      input: {number: "{{ number }}"}
      code: |
        result = number * number
"""
)

BREAK = (
    HEAD % {"name": "break"}
    + """
workflow:
  - step: fall
    tool:
      kind: python
      code: |
        raise ValueError("on purpose")
"""
)

SLOW = (
    HEAD % {"name": "slow"}
    + """
workflow:
  - step: sleep
    tool:
      kind: python
      code: |
        import time
        time.sleep(60)
"""
)

LARGE = (
    HEAD % {"name": "large"}
    + """
workflow:
  - step: make
    loop: {in: "{{ range(12) | list }}", iterator: number}
    tool:
      kind: python
      code: |
        result = "x" * 1_000_000
"""
)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_playbook(text: str) -> Path:
        file = tmp_path / "playbook.yaml"
        file.write_text(text)
        return file

    return write_playbook


def test_json_is_one_object_with_resolved_results(stack: DevStack, write: Any) -> None:
    answer = noetl_process(
        "run", write(GREET), "--json", "--set", "who=you", "--set", "tags.b=[2]", url=stack.url
    )

    assert answer.returncode == 0, answer.stderr
    outcome = json.loads(answer.stdout)
    assert outcome.keys() == {"execution_id", "status", "duration_s", "error", "steps"}
    assert outcome["status"] == "COMPLETED"
    assert outcome["error"] is None
    assert outcome["duration_s"] > 0
    assert outcome["execution_id"].isdigit()
    assert outcome["steps"] == {
        "greet": {
            "status": "COMPLETED",
            "result": {"text": "hello you", "tags": {"a": 1, "b": [2]}},
        },
        "count": {"status": "COMPLETED", "result": [0, 1, 4, 9, 16]},
    }


def test_progress_goes_to_stderr_line_by_line_when_that_is_no_terminal(
    stack: DevStack, write: Any
) -> None:
    answer = noetl("run", write(GREET), url=stack.url)

    assert "count: completed 5/5" in answer.stderr
    assert "\x1b" not in answer.stderr
    assert "COMPLETED tests/greet" in answer.stdout
    assert '{"text":"hello world"' in answer.stdout
    assert "noetl events" in answer.stdout


def test_a_path_of_the_catalog_runs_its_newest_version(stack: DevStack, write: Any) -> None:
    noetl("register", write(GREET), url=stack.url)

    answer = noetl("run", "tests/greet", "--json", url=stack.url)

    assert json.loads(answer.stdout)["status"] == "COMPLETED"


def test_a_failed_execution_exits_1_and_says_which_step_and_why(
    stack: DevStack, write: Any
) -> None:
    file = write(BREAK)
    answer = noetl("run", file, "--json", url=stack.url)
    outcome = json.loads(answer.stdout)
    assert answer.returncode == 1
    assert outcome["status"] == "FAILED"
    assert outcome["steps"]["fall"]["status"] == "FAILED"
    assert "on purpose" in json.dumps(outcome["error"])

    told = noetl("run", file, url=stack.url)
    assert told.returncode == 1
    assert "on purpose" in told.stdout


def test_a_timeout_exits_3_and_the_execution_goes_on_until_it_is_cancelled(
    stack: DevStack, write: Any
) -> None:
    answer = noetl("run", write(SLOW), "--json", "--timeout", "1", url=stack.url)
    outcome = json.loads(answer.stdout)
    assert answer.returncode == 3
    assert outcome["status"] in {"PENDING", "RUNNING"}
    execution_id = outcome["execution_id"]
    assert f"noetl cancel {execution_id}" in answer.stderr

    cancelled = noetl("cancel", execution_id, "--reason", "enough", url=stack.url)
    assert cancelled.returncode == 0, cancelled.stderr

    def is_cancelled() -> bool:
        status = noetl("status", execution_id, "--json", url=stack.url)
        return bool(json.loads(status.stdout)["status"] == "CANCELLED")

    eventually(is_cancelled, seconds=60)
    again = noetl("cancel", execution_id, url=stack.url)
    assert again.returncode == 2
    assert "CANCELLED" in again.stderr


def test_results_too_large_for_one_answer_are_fetched_all_the_same(
    stack: DevStack, write: Any
) -> None:
    answer = noetl("run", write(LARGE), "--json", url=stack.url)

    assert json.loads(answer.stdout)["steps"]["make"]["result"] == ["x" * 1_000_000] * 12


def test_an_invalid_playbook_exits_2_before_anything_is_started(write: Any, tmp_path: Path) -> None:
    file = write(GREET.replace("tool:", "tol:", 1))

    answer = noetl("run", file, "--json", home=tmp_path)

    assert answer.returncode == 2
    assert f"{file}:9:5: " in answer.stderr
    assert "`tool`" in answer.stderr
    assert "temporary" not in answer.stderr
    assert answer.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["no/such/path"],
        ["missing.yaml"],
        ["missing.yaml", "--set", "a"],
        ["missing.yaml", "--timeout", "soon"],
        [],
    ],
)
def test_wrong_usage_exits_2_with_a_sentence_and_no_traceback(
    tmp_path: Path, arguments: list[str]
) -> None:
    answer = noetl("run", *arguments, home=tmp_path)

    assert answer.returncode == 2
    assert answer.stderr.strip()
    assert "Traceback" not in answer.stderr


def test_an_unknown_path_of_the_catalog_exits_2(stack: DevStack) -> None:
    answer = noetl("run", "no/such/path", url=stack.url)

    assert answer.returncode == 2
    assert "no/such/path" in answer.stderr


def test_a_gateway_that_is_not_there_is_named() -> None:
    answer = noetl("status", "1", url="http://127.0.0.1:9")

    assert answer.returncode == 1
    assert "http://127.0.0.1:9" in answer.stderr
    assert "noetl dev" in answer.stderr


@pytest.mark.slow
def test_with_nothing_running_it_starts_a_system_of_its_own_and_leaves_nothing(
    write: Any, tmp_path: Path
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    answer = noetl_process("run", write(GREET), "--json", home=tmp_path, TMPDIR=str(temporary))

    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["status"] == "COMPLETED"
    assert "starting a temporary one" in answer.stderr
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_a_system_of_its_own_that_cannot_work_is_not_waited_for(write: Any, tmp_path: Path) -> None:
    answer = noetl_process("run", write(GREET), home=tmp_path, NOETL_WORKER_SLOTS="0")

    assert answer.returncode == 1
    assert "worker-1 ended (exit code 2)" in answer.stderr.splitlines()[-1]
    assert "NOETL_WORKER_SLOTS" in answer.stderr.splitlines()[-1]


@pytest.mark.slow
def test_it_finds_the_running_dev_of_the_default_data_directory(write: Any, tmp_path: Path) -> None:
    with dev_stack(tmp_path / "noetl" / "dev") as own:
        answer = noetl("run", write(GREET), "--json", home=tmp_path)
        assert answer.returncode == 0, answer.stderr
        assert "temporary" not in answer.stderr

        execution_id = json.loads(answer.stdout)["execution_id"]
        assert execution_id in noetl("executions", url=own.url).stdout


@pytest.mark.slow
def test_an_interrupt_says_how_to_go_on_watching(stack: DevStack, write: Any) -> None:
    process = subprocess.Popen(
        [*NOETL, "run", str(write(SLOW))],
        env=os.environ | {"NOETL_URL": stack.url},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    first = process.stderr.readline()
    process.send_signal(signal.SIGINT)

    rest = process.stderr.read()
    assert process.wait(60) == 130
    execution_id = first.split()[1]
    assert f"noetl status {execution_id}" in rest
    assert f"noetl cancel {execution_id}" in rest
    noetl("cancel", execution_id, url=stack.url)


@pytest.mark.slow
def test_a_system_of_its_own_goes_when_the_command_is_terminated(
    write: Any, tmp_path: Path
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(
        [*NOETL, "run", str(write(SLOW))],
        env=os.environ | {"XDG_DATA_HOME": str(tmp_path), "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "sleep: running" not in process.stderr.readline():
        assert process.poll() is None

    process.terminate()

    assert process.wait(120) == 128 + signal.SIGTERM
    assert list(temporary.iterdir()) == []
    assert not [p for p in psutil.process_iter(["cmdline"]) if _is_in(temporary, p)]


def _is_in(folder: Path, process: psutil.Process) -> bool:
    return any(str(folder) in argument for argument in process.info["cmdline"] or ())
