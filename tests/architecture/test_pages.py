"""What a page names, the program names where one looks for it."""

import re
from pathlib import Path

from cli.stacks import noetl
from noetl_core.wire.http import DeadLettersQuery

ROOT = Path(__file__).parents[2]


def test_who_asks_for_dead_letters_is_told_every_source() -> None:
    operations = (ROOT / "docs" / "operations.md").read_text()
    section = operations.split("\n## Dead letters\n")[1].split("\n## ")[0]
    sources = re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE)
    assert "broker" in sources

    told = " ".join(noetl("dead-letters", "list", "--help").stdout.split())

    for source in sources:
        named = re.compile(rf"\b{re.escape(source)}(,| or|\.($|\s))")
        assert named.search(told), source
        assert named.search(DeadLettersQuery.__doc__ or ""), source
