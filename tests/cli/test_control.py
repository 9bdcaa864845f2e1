"""cancel, pause, resume, retry, rerun, fork, signal, approve and deny, on a running stack."""

import json
from pathlib import Path

import pytest

from cli.stacks import DevStack, eventually, noetl

PLAYBOOK = """\
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: steered, path: tests/steered}
workload: {name: nobody}
workflow:
  - step: first
    tool: {kind: noop, value: "{{ workload.name }}"}
    set: {ctx.greeting: "hello {{ workload.name }}"}
    next: {arcs: [{step: second}]}
  - step: second
    tool: {kind: noop, value: "{{ ctx.greeting }}, {{ first }}"}
"""

GATED = """\
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: gated, path: tests/gated}
workflow:
  - step: hold
    tool: {kind: wait, signal: go}
    next: {arcs: [{step: after}]}
  - step: after
    tool: {kind: noop, value: done}
"""

ALL = {
    "cancel": (),
    "pause": (),
    "resume": (),
    "retry": (),
    "rerun": (),
    "fork": ("first",),
    "signal": ("go",),
    "approve": ("go",),
    "deny": ("go",),
}


@pytest.fixture
def playbook(tmp_path: Path) -> Path:
    file = tmp_path / "steered.yaml"
    file.write_text(PLAYBOOK)
    return file


@pytest.fixture
def ended(stack: DevStack, playbook: Path) -> str:
    """An execution that has completed, with a payload."""
    answer = noetl("run", playbook, "--set", "name=Ada", "--json", url=stack.url)
    execution_id: str = json.loads(answer.stdout)["execution_id"]
    return execution_id


@pytest.mark.parametrize("command", ALL)
def test_an_unknown_execution_is_said_to_be_unknown(stack: DevStack, command: str) -> None:
    answer = noetl(command, "12345", *ALL[command], url=stack.url)

    assert answer.returncode == 2
    assert "12345" in answer.stderr
    assert answer.stdout == ""


@pytest.mark.parametrize("command", ALL)
def test_without_a_noetl_it_says_how_to_have_one(tmp_path: Path, command: str) -> None:
    answer = noetl(command, "12345", *ALL[command], home=tmp_path)

    assert answer.returncode == 1
    assert "noetl dev" in answer.stderr


@pytest.mark.parametrize("command", ["cancel", "pause", "resume", "signal"])
def test_what_makes_no_sense_after_the_end_is_refused_with_its_status(
    stack: DevStack, ended: str, command: str
) -> None:
    answer = noetl(command, ended, *ALL[command], url=stack.url)

    assert answer.returncode == 2
    assert "COMPLETED" in answer.stderr


def test_a_rerun_is_a_new_execution_with_the_old_payload_and_what_goes_over_it(
    stack: DevStack, ended: str
) -> None:
    printed = noetl("rerun", ended, url=stack.url)
    same = json.loads(noetl("rerun", ended, "--wait", "--json", url=stack.url).stdout)
    other = json.loads(
        noetl("rerun", ended, "--set", "name=Bob", "--wait", "--json", url=stack.url).stdout
    )

    assert printed.returncode == 0
    assert printed.stdout.strip().isdigit()
    assert len({ended, printed.stdout.strip(), same["execution_id"], other["execution_id"]}) == 4
    assert same["steps"]["second"]["result"] == "hello Ada, Ada"
    assert other["steps"]["second"]["result"] == "hello Bob, Bob"


def test_a_fork_begins_at_its_step_with_what_was_true_then(stack: DevStack, ended: str) -> None:
    answer = noetl("fork", ended, "second", "--wait", "--json", url=stack.url)

    forked = json.loads(answer.stdout)
    assert answer.returncode == 0
    assert forked["steps"]["second"]["result"] == "hello Ada, Ada"
    events = noetl("events", forked["execution_id"], url=stack.url).stdout
    assert "first.1" not in events


def test_a_retry_needs_a_step_that_was_entered(stack: DevStack, ended: str) -> None:
    without = noetl("retry", ended, url=stack.url)
    misspelled = noetl("retry", ended, "--step", "secnod", url=stack.url)
    retried = noetl("retry", ended, "--step", "second", "--wait", url=stack.url)

    assert (without.returncode, misspelled.returncode) == (2, 2)
    assert "name the step" in without.stderr
    assert "`second`" in misspelled.stderr
    assert retried.returncode == 0
    assert noetl("events", ended, url=stack.url).stdout.count("execution.completed") == 2


def test_a_step_waits_for_its_signal_and_a_denial_fails_it(stack: DevStack, tmp_path: Path) -> None:
    file = tmp_path / "gated.yaml"
    file.write_text(GATED)
    gated = [begun(stack, file) for _ in range(2)]

    told = noetl("signal", gated[0], "go", "--data", '{"n": 1}', "--wait", "--json", url=stack.url)
    denied = noetl("deny", gated[1], "go", "--by", "ada", "--wait", url=stack.url)

    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["steps"]["hold"]["result"] == {"n": 1}
    assert denied.returncode == 1
    assert "denied by ada" in denied.stdout


def test_a_paused_execution_stands_still_until_it_is_resumed(
    stack: DevStack, tmp_path: Path
) -> None:
    file = tmp_path / "gated.yaml"
    file.write_text(GATED)
    execution_id = begun(stack, file)

    assert noetl("pause", execution_id, url=stack.url).stdout.strip() == execution_id
    again = noetl("pause", execution_id, url=stack.url)
    status = noetl("status", execution_id, url=stack.url).stdout
    noetl("signal", execution_id, "go", url=stack.url)
    resumed = noetl("resume", execution_id, "--wait", url=stack.url)

    assert again.returncode == 2
    assert f"noetl resume {execution_id}" in status
    assert resumed.returncode == 0, resumed.stderr


def begun(stack: DevStack, file: Path) -> str:
    """An execution that has come to its wait."""
    answer = noetl("run", file, "--timeout", "0.2", "--json", url=stack.url)
    assert answer.returncode == 3, answer.stderr
    execution_id: str = json.loads(answer.stdout)["execution_id"]

    def waits() -> bool:
        return "waits for the signal" in noetl("status", execution_id, url=stack.url).stdout

    eventually(waits, seconds=60)
    return execution_id
