"""What a data directory keeps, and what it refuses."""

import stat
from pathlib import Path

import pytest

from noetl_cli.failure import EXIT_USAGE, CommandFailed
from noetl_cli.stack.data_dir import DataDir


@pytest.fixture
def data_dir(tmp_path: Path) -> DataDir:
    made = DataDir(tmp_path / "data")
    made.create()
    return made


def test_a_second_supervisor_of_one_directory_is_refused_and_told_which(data_dir: DataDir) -> None:
    with (
        data_dir.locked(),
        pytest.raises(CommandFailed, match="in use") as failed,
        DataDir(data_dir.root).locked(),
    ):
        pytest.fail("two supervisors hold one data directory")

    assert str(data_dir.root) in str(failed.value)
    assert failed.value.exit_code == EXIT_USAGE


def test_the_lock_is_free_again_when_its_holder_is_gone(data_dir: DataDir) -> None:
    with data_dir.locked():
        pass
    with data_dir.locked():
        pass


def test_the_encryption_key_is_made_once_and_nobody_else_may_read_it(data_dir: DataDir) -> None:
    key = data_dir.encryption_key()

    assert DataDir(data_dir.root).encryption_key() == key
    assert stat.S_IMODE((data_dir.root / "key").stat().st_mode) == 0o600


def test_a_directory_that_cannot_be_made_is_a_usage_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")

    with pytest.raises(CommandFailed, match="file/data") as failed:
        DataDir(tmp_path / "file" / "data").create()

    assert failed.value.exit_code == EXIT_USAGE


def test_kept_ports_survive_a_broken_file(data_dir: DataDir) -> None:
    data_dir.keep_ports({"postgres": 20_001})
    assert data_dir.kept_ports() == {"postgres": 20_001}

    (data_dir.root / "ports.json").write_text("{broken")
    assert data_dir.kept_ports() == {}
