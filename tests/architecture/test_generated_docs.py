"""What docs/generated says is what the code says."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_METRIC = re.compile(r"`(noetl_\w+)[`{]")


def _pages() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pages: dict[str, str] = module.pages()
    return pages


@pytest.mark.parametrize("name", ["events.md", "settings.md", "subjects.md", "metrics.md"])
def test_the_page_is_what_the_code_gives(name: str) -> None:
    committed = (ROOT / "docs" / "generated" / name).read_text()

    assert committed == _pages()[name], "run ./task docs and commit what changed"


def metrics_shown() -> set[str]:
    return set(_METRIC.findall((ROOT / "docs" / "generated" / "metrics.md").read_text()))


def test_every_metric_that_operations_name_is_shown_by_that_name() -> None:
    operations = (ROOT / "docs" / "operations.md").read_text()
    before, table = operations.split("| recorded by itself |")
    # What is in the database is told in a table of its own; /metrics does not show it.
    named = set(_METRIC.findall(before + table.partition("\n\n")[2]))

    assert "noetl_projection_lag_ms" in named
    assert named - metrics_shown() == set()
