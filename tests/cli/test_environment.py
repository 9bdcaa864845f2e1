"""What reaches the services of a stack."""

from pathlib import Path

import msgspec
import pytest

from noetl_cli.stack import environment as stack_environment
from noetl_cli.stack.data_dir import DataDir
from noetl_cli.stack.environment import service_environment
from noetl_core.process.config import Config, load_config, variables_of
from noetl_core.process.ownership import ShardConfig
from noetl_worker.config import WorkerConfig


@pytest.fixture
def data_dir(tmp_path: Path) -> DataDir:
    return DataDir(tmp_path)


def test_the_user_wins_over_defaults_and_the_supervisor_over_the_user(data_dir: DataDir) -> None:
    user = {"NOETL_STORE_DIR": "/mine", "NOETL_NATS_URL": "nats://elsewhere", "HOME": "/home/me"}

    environment = service_environment(user, data_dir, {"NOETL_NATS_URL": "nats://here"})

    assert environment["NOETL_STORE_DIR"] == "/mine"
    assert environment["NOETL_NATS_URL"] == "nats://here"
    assert environment["HOME"] == "/home/me"
    assert environment["NOETL_ENCRYPTION_KEY"] == data_dir.encryption_key()


@pytest.mark.parametrize("prefix", ["NOETL_SHARD_", "NOETL_"])
@pytest.mark.parametrize(
    "user",
    [{}, {"LEASE": "1.5"}, {"HEARTBEAT": "9"}, {"LEASE": "3", "HEARTBEAT": "0.5"}],
)
def test_a_lease_is_always_some_heartbeats_long(
    data_dir: DataDir, prefix: str, user: dict[str, str]
) -> None:
    named = {f"{prefix}{name}_SECONDS": value for name, value in user.items()}

    environment = service_environment(named, data_dir, {})

    lease = float(environment[f"{prefix}LEASE_SECONDS"])
    assert lease >= 3 * float(environment[f"{prefix}HEARTBEAT_SECONDS"])
    assert named.items() <= environment.items()


@pytest.mark.parametrize(
    ("kind", "field", "names"),
    [
        (ShardConfig, "shard_lease_seconds", stack_environment.SHARD_LEASE_NAMES),
        (ShardConfig, "shard_heartbeat_seconds", stack_environment.SHARD_HEARTBEAT_NAMES),
        (WorkerConfig, "lease_seconds", stack_environment.COMMAND_LEASE_NAMES),
        (WorkerConfig, "heartbeat_seconds", stack_environment.COMMAND_HEARTBEAT_NAMES),
    ],
)
def test_a_lease_is_known_by_all_the_names_that_its_service_understands(
    kind: type[Config], field: str, names: tuple[str, ...]
) -> None:
    fields = {each.name: each for each in msgspec.structs.fields(kind)}

    assert variables_of(fields[field]) == names


@pytest.mark.parametrize(
    ("user", "shards", "commands"),
    [
        ({}, (5, 1), (10, 2)),
        ({"NOETL_SHARD_LEASE_SEC": "3"}, (3, 0.6), (10, 2)),
        ({"NOETL_SHARD_HEARTBEAT_SEC": "4"}, (20, 4), (10, 2)),
        ({"NOETL_SHARD_LEASE_SEC": "3", "NOETL_SHARD_LEASE_SECONDS": "7"}, (7, 1.4), (10, 2)),
        ({"NOETL_SHARD_LEASE_SEC": "3", "NOETL_SHARD_LEASE_SECONDS": ""}, (3, 0.6), (10, 2)),
        ({"NOETL_SHARD_HEARTBEAT_SECONDS": ""}, (5, 1), (10, 2)),
        ({"NOETL_COMMAND_HEARTBEAT_TIMEOUT_SECONDS": "300"}, (5, 1), (300, 60)),
        ({"NOETL_COMMAND_HEARTBEAT_TIMEOUT_SECONDS": "0"}, (5, 1), (10, 2)),
    ],
)
def test_a_lease_that_the_user_has_set_by_any_of_its_names_reaches_the_services(
    data_dir: DataDir,
    user: dict[str, str],
    shards: tuple[float, float],
    commands: tuple[float, float],
) -> None:
    environ = service_environment(user, data_dir, {"NOETL_POSTGRES_DSN": "postgresql://here"})

    shard, worker = load_config(ShardConfig, environ), load_config(WorkerConfig, environ)

    assert (shard.shard_lease_seconds, shard.shard_heartbeat_seconds) == pytest.approx(shards)
    assert (worker.lease_seconds, worker.heartbeat_seconds) == pytest.approx(commands)


def test_a_wrong_lease_reaches_the_service_by_the_name_that_the_user_gave_it(
    data_dir: DataDir,
) -> None:
    environ = service_environment({"NOETL_SHARD_LEASE_SEC": "soon"}, data_dir, {})

    assert environ["NOETL_SHARD_LEASE_SEC"] == "soon"
    assert "NOETL_SHARD_LEASE_SECONDS" not in environ
