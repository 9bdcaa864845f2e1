"""Directories for files on their way are gone afterwards, whoever dies."""

import signal
import subprocess
import sys
from pathlib import Path

from noetl_core.blob.scratch import scratch_directory

KILLED = """
import os, signal, sys
from pathlib import Path
from noetl_core.blob.scratch import scratch_directory
with scratch_directory(Path(sys.argv[1]), prefix="x-") as directory:
    (directory / "file").write_bytes(b"x")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_is_gone_when_its_block_is_left(tmp_path: Path) -> None:
    with scratch_directory(tmp_path, prefix="x-") as directory:
        (directory / "file").write_bytes(b"x")

    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert list(tmp_path.rglob("file"))

    with scratch_directory(tmp_path, prefix="x-"):
        assert not list(tmp_path.rglob("file"))

    assert list(tmp_path.iterdir()) == []


def test_what_somebody_uses_is_left_alone(tmp_path: Path) -> None:
    with scratch_directory(tmp_path, prefix="x-") as one:
        (one / "file").write_bytes(b"x")
        with scratch_directory(tmp_path, prefix="x-") as two:
            assert one != two

        assert (one / "file").exists()
