"""What user code can find out about the worker that runs it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from noetl_worker import hiding

NOBODY = 65534
HIDE = f"{Path(hiding.__file__).read_text()}\nhide_environment()\n"
READ = """
try:
    found = b"the secret" in open("/proc/self/environ", "rb").read()
except PermissionError:
    found = False
print("found" if found else "hidden")
"""


def seen_by_itself(code: str) -> str:
    """Run as a user that is not root, with a Python that this user may read."""
    python = shutil.which("python3", path="/usr/bin:/bin")
    if sys.platform != "linux" or os.geteuid() != 0 or python is None:
        pytest.skip("needs Linux, root and a python3 in /usr/bin")
    ran = subprocess.run(
        [python, "-c", code],
        env={"NOETL_SECRET": "the secret"},
        user=NOBODY,
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.strip()


def test_the_environment_of_a_worker_cannot_be_read_by_its_own_user() -> None:
    assert seen_by_itself(READ) == "found"
    assert seen_by_itself(HIDE + READ) == "hidden"
