"""`noetl dev`: what it says, what it keeps, and what it does when something dies."""

import asyncio
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import asyncpg
import psutil
import pytest

from cli.stacks import DevStack, dev_stack, eventually, noetl, noetl_process
from noetl_cli.stack.services import ENGINE_SERVICES

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


def test_ps_says_where_the_metrics_of_each_part_are(stack: DevStack) -> None:
    metrics = stack.metrics()

    assert metrics["postgres"] is None
    assert metrics["nats"] is None
    for name in ("engine", "worker-1"):
        eventually(partial(_shows, "noetl_heartbeats_total", metrics[name]), seconds=60)
    table = noetl("dev", "ps", "--data-dir", stack.data_dir).stdout
    assert f"worker-1        {metrics['worker-1']}\n" in table


def test_a_data_directory_in_use_is_refused_with_a_way_out(stack: DevStack) -> None:
    second = noetl_process("dev", "--data-dir", stack.data_dir)

    assert second.returncode == 2
    assert f"{stack.data_dir} is in use" in second.stderr
    assert "Traceback" not in second.stderr
    assert stack.ps(), "the first one was disturbed"


@pytest.mark.parametrize("name", ["nats", "worker-1", "engine", "postgres"])
def test_a_part_that_is_killed_is_back_by_itself(stack: DevStack, name: str) -> None:
    killed = stack.ps()[name]

    os.kill(killed, signal.SIGKILL)

    eventually(lambda: stack.recorded().get(name, killed) != killed, seconds=60)
    assert stack.ps()[name] != killed
    eventually(lambda: noetl("executions", url=stack.url).returncode == 0, seconds=60)


def test_a_part_that_was_killed_has_its_metrics_where_they_were(stack: DevStack) -> None:
    before = stack.metrics()["worker-1"]
    killed = stack.ps()["worker-1"]

    os.kill(killed, signal.SIGKILL)

    eventually(lambda: stack.recorded().get("worker-1", killed) != killed, seconds=60)
    assert stack.metrics()["worker-1"] == before
    eventually(lambda: _shows("noetl_heartbeats_total", before), seconds=60)


@pytest.mark.slow
@pytest.mark.measured
def test_a_part_that_was_killed_is_started_again_within_a_second(stack: DevStack) -> None:
    killed = stack.ps()["worker-1"]

    os.kill(killed, signal.SIGKILL)

    eventually(lambda: stack.recorded().get("worker-1", killed) != killed, seconds=1)


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
        eventually(lambda: not any(map(_runs, pids)), seconds=60)

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
            assert survivor.wait(60) == -signal.SIGTERM
            assert stranger.poll() is None
    finally:
        for process in (survivor, stranger):
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def separate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    """Every service in a process of its own, and the dead stay dead."""
    data_dir = tmp_path_factory.mktemp("separate") / "data"
    options = ("--processes", "--workers", "2", "--no-restart")
    with dev_stack(data_dir, *options, environ={"NOETL_HEALTH_PORT": "9090"}) as running:
        yield running


@pytest.mark.slow
@pytest.mark.measured
def test_every_service_with_a_process_shows_its_own_metrics(
    separate: DevStack, playbook: Path
) -> None:
    ended = noetl("run", playbook, url=separate.url)
    assert ended.returncode == 0, ended.stderr

    metrics = separate.metrics()

    places = [url for url in metrics.values() if url is not None]
    assert len(places) == len(set(places)) == len(ENGINE_SERVICES) + 2
    for name, measured in {
        "api-gateway": "noetl_gateway_executions_accepted_total",
        "broker": "noetl_broker_events_total",
        "projection": "noetl_projection_events_total",
    }.items():
        eventually(partial(_shows, measured, metrics[name]), seconds=60)
    workers = [metrics["worker-1"], metrics["worker-2"]]
    assert any(_shows("noetl_worker_commands_total", url) for url in workers)


@pytest.mark.slow
@pytest.mark.measured
def test_a_health_port_of_the_user_is_said_to_count_for_nothing(separate: DevStack) -> None:
    assert "NOETL_HEALTH_PORT is not used here" in _errors(separate)


@pytest.mark.slow
@pytest.mark.measured
def test_every_service_has_its_process_and_the_dead_stay_dead_if_so_wished(
    separate: DevStack,
) -> None:
    parts = separate.ps()
    assert parts.keys() == {
        "postgres", "nats", "api-gateway", "broker", "projection", "shard-manager",
        "checkpointer", "compactor", "reaper", "worker-1", "worker-2",
    }  # fmt: skip

    os.kill(parts["worker-2"], signal.SIGKILL)

    eventually(lambda: "worker-2" not in separate.ps(), seconds=60)
    eventually(lambda: "not started again" in _errors(separate), seconds=60)


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
    home = Path(tempfile.mkdtemp(prefix="noetl-user-", dir="/tmp"))
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


def _errors(stack: DevStack) -> str:
    return stack.data_dir.with_suffix(".err").read_text()


def _shows(measured: str, url: str | None) -> bool:
    assert url is not None
    try:
        with urllib.request.urlopen(url) as answer:
            return measured in answer.read().decode()
    except OSError:
        return False


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
