"""What reaches the services of a stack."""

from pathlib import Path

import pytest

from noetl_cli.stack.data_dir import DataDir
from noetl_cli.stack.environment import service_environment


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
