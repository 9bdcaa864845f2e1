"""support/others.py: whose the processor was."""

import subprocess
import sys

import pytest

from support import others
from support.others import SHARE_MAX, Others

BUSY = "import time\nuntil = time.process_time() + 0.5\nwhile time.process_time() < until: pass"


def test_what_we_have_started_is_not_somebody_else() -> None:
    watch, before = Others(), others._own_seconds()

    subprocess.run([sys.executable, "-c", BUSY], check=True)

    assert others._own_seconds() - before >= 0.4
    assert 0 <= watch.share() <= 1


@pytest.mark.parametrize(("share", "slowness"), [(0.0, 1.0), (0.2, 1.25), (0.9, 1 / SHARE_MAX)])
def test_whoever_had_a_part_of_the_machine_may_take_longer_in_proportion(
    monkeypatch: pytest.MonkeyPatch, share: float, slowness: float
) -> None:
    monkeypatch.setattr(Others, "share", lambda _: share)

    assert Others().slowness() == pytest.approx(slowness)
