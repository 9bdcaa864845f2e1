"""What docs/generated says is what the code says."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_METRIC = re.compile(r"`(noetl_\w+)[`{]")
_IN_THE_DATABASE = {
    "noetl_heartbeat_success_rate",
    "noetl_heartbeat_latency_ms",
    "noetl_process_cpu_percent",
    "noetl_process_memory_peak_bytes",
}
"""What /api/metrics/query answers to, beside what /metrics show."""


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
    named = set(_METRIC.findall((ROOT / "docs" / "operations.md").read_text()))

    assert "noetl_projection_lag_ms" in named
    assert named - _IN_THE_DATABASE - metrics_shown() == set()
