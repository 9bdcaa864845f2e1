"""`noetl dev`: what it says, what it keeps, and what it does when something dies."""

import asyncio
import os
import signal
import subprocess
import sys
import sysconfig
import urllib.request
from pathlib import Path

import asyncpg
import psutil
import pytest

from cli.stacks import DevStack, dev_stack, eventually, noetl, noetl_process

PLAYBOOK = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: kept, path: tests/kept}
workflow:
  - step: only
    tool: {kind: noop}
"""


@pytest.fixture
def playbook(tmp_path: Path) -> Path:
    file = tmp_path / "kept.yaml"
    file.write_text(PLAYBOOK)
    return file


def test_info_says_where_everything_is_and_the_gateway_answers_there(stack: DevStack) -> None:
    places = stack.info()

    assert places.keys() == {"url", "dsn", "nats_url", "data_dir"}
    assert places["data_dir"] == str(stack.data_dir)
    assert places["dsn"].startswith("postgresql://")
    assert places["nats_url"].startswith("nats://127.0.0.1:")
    with urllib.request.urlopen(f"{places['url']}/health") as answer:
        assert answer.status == 200


def test_ps_names_every_part_with_its_process(stack: DevStack) -> None:
    parts = stack.ps()

    assert parts.keys() == {"postgres", "nats", "engine", "worker-1"}
    assert psutil.Process(parts["postgres"]).name() == "postgres"
    assert psutil.Process(parts["nats"]).name() == "nats-server"
    assert psutil.Process(parts["postgres"]).ppid() == stack.process.pid


def test_a_data_directory_in_use_is_refused_with_a_way_out(stack: DevStack) -> None:
    second = noetl_process("dev", "--data-dir", stack.data_dir)

    assert second.returncode == 2
    assert f"{stack.data_dir} is in use" in second.stderr
    assert "Traceback" not in second.stderr
    assert stack.ps(), "the first one was disturbed"


@pytest.mark.parametrize("name", ["nats", "worker-1", "engine", "postgres"])
def test_a_part_that_is_killed_is_back_within_moments(stack: DevStack, name: str) -> None:
    killed = stack.ps()[name]

    os.kill(killed, signal.SIGKILL)

    eventually(lambda: stack.recorded().get(name, killed) != killed, seconds=2)
    assert stack.ps()[name] != killed
    eventually(lambda: noetl("executions", url=stack.url).returncode == 0, seconds=30)


def test_ps_and_info_of_a_directory_where_nothing_runs_say_so(tmp_path: Path) -> None:
    for command in ("ps", "info"):
        answer = noetl("dev", command, "--json", "--data-dir", tmp_path / "nothing")

        assert answer.returncode == 1
        assert "no `noetl dev` runs in" in answer.stderr
        assert answer.stdout == ""


@pytest.mark.slow
@pytest.mark.measured
def test_a_clean_stop_ends_every_part_and_keeps_the_data(tmp_path: Path, playbook: Path) -> None:
    data_dir = tmp_path / "data"
    with dev_stack(data_dir) as first:
        assert "version 1 (registered)" in noetl("register", playbook, url=first.url).stdout
        places, pids = first.info(), first.ps().values()
        assert first.stop() == 0
        assert not any(map(psutil.pid_exists, pids))

    with dev_stack(data_dir) as second:
        assert second.info() == places
        assert "version 1 (unchanged)" in noetl("register", playbook, url=second.url).stdout


@pytest.mark.slow
@pytest.mark.measured
def test_a_killed_supervisor_takes_its_parts_along_and_the_next_one_finds_the_data(
    tmp_path: Path, playbook: Path
) -> None:
    data_dir = tmp_path / "data"
    with dev_stack(data_dir) as first:
        noetl("register", playbook, url=first.url)
        pids = first.ps().values()
        first.kill()
        eventually(lambda: not any(map(_runs, pids)), seconds=5)

    with dev_stack(data_dir) as second:
        assert "version 1 (unchanged)" in noetl("register", playbook, url=second.url).stdout


@pytest.mark.slow
@pytest.mark.measured
def test_a_part_that_outlived_its_supervisor_is_ended_by_the_next_one(tmp_path: Path) -> None:
    """As on a system where a child cannot ask to die with its parent."""
    data_dir = tmp_path / "data"
    with dev_stack(data_dir) as first:
        state = (data_dir / "dev.json").read_bytes()
        first.stop()
    survivor = subprocess.Popen(["sleep", "60"])
    stranger = subprocess.Popen(["sleep", "60"])
    started = psutil.Process(survivor.pid).create_time()
    left = b'{"name":"nats","pid":%d,"started":%f},{"name":"engine","pid":%d,"started":%f}' % (
        survivor.pid,
        started,
        stranger.pid,
        started - 3600,
    )
    (data_dir / "dev.json").write_bytes(state.replace(b'"parts":[', b'"parts":[' + left + b","))
    try:
        with dev_stack(data_dir):
            assert survivor.wait(5) == -signal.SIGTERM
            assert stranger.poll() is None
    finally:
        for process in (survivor, stranger):
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.measured
def test_every_service_has_its_process_and_the_dead_stay_dead_if_so_wished(tmp_path: Path) -> None:
    with dev_stack(tmp_path / "data", "--processes", "--workers", "2", "--no-restart") as stack:
        parts = stack.ps()
        assert parts.keys() == {
            "postgres", "nats", "api-gateway", "broker", "projection", "shard-manager",
            "checkpointer", "compactor", "reaper", "worker-1", "worker-2",
        }  # fmt: skip

        os.kill(parts["worker-2"], signal.SIGKILL)

        eventually(lambda: "worker-2" not in stack.ps(), seconds=5)
        eventually(lambda: "not started again" in _errors(tmp_path), seconds=5)


@pytest.mark.slow
@pytest.mark.measured
def test_a_postgres_and_a_nats_of_the_user_are_used_instead_of_ours(
    stack: DevStack, tmp_path: Path, playbook: Path
) -> None:
    theirs = stack.info()
    dsn = theirs["dsn"].removesuffix("noetl") + "elsewhere"
    asyncio.run(_create_database(theirs["dsn"], "elsewhere"))

    options = ("--postgres", dsn, "--nats", theirs["nats_url"], "--workers", "0")
    with dev_stack(tmp_path / "data", *options) as own:
        assert own.ps().keys() == {"engine"}
        assert own.info()["dsn"] == dsn
        assert "version 1 (registered)" in noetl("register", playbook, url=own.url).stdout


async def _create_database(dsn: str, name: str) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute(f"CREATE DATABASE {name}")
    await connection.close()


def test_a_wrong_setting_reaches_the_services_and_is_named(tmp_path: Path) -> None:
    answer = noetl_process("dev", "--data-dir", tmp_path / "data", NOETL_LOG_LEVEL="loud")

    assert answer.returncode == 1
    assert "engine did not start" in answer.stderr
    assert "NOETL_LOG_LEVEL='loud'" in answer.stderr
    assert answer.stdout == ""


@pytest.mark.slow
@pytest.mark.measured
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_it_runs_for_an_ordinary_user(tmp_path_factory: pytest.TempPathFactory) -> None:
    python = _python_of_everybody()
    if python is None:
        pytest.skip("no interpreter here that an ordinary user may run")
    home = Path("/tmp") / f"noetl-user-{os.getpid()}"
    home.mkdir(mode=0o777)
    home.chmod(0o777)
    programs = Path(sysconfig.get_path("scripts"))
    environ = {
        "HOME": str(home),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
    }
    command = (python, "-m", "noetl_cli")
    try:
        with dev_stack(
            home / "data", command=command, environ=environ, user="nobody", extra_groups=[], cwd="/"
        ) as stack:
            assert psutil.Process(stack.ps()["postgres"]).username() == "nobody"
            assert (home / "data" / "postgres").owner() == "nobody"
    finally:
        subprocess.run(["rm", "-rf", str(home)], check=True)


def _python_of_everybody() -> str | None:
    for python in (sys.executable, "/usr/bin/python3.11", "/usr/bin/python3"):
        probe = [python, "-c", "import asyncpg, msgspec, psutil, noetl_cli.stack.supervisor"]
        environ = {"PYTHONPATH": os.pathsep.join(sys.path)}
        try:
            if (
                subprocess.run(probe, user="nobody", cwd="/", env=environ, check=False).returncode
                == 0
            ):
                return python
        except OSError:
            continue
    return None


def _errors(folder: Path) -> str:
    return (folder / "data.err").read_text()


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
