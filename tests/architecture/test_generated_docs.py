"""What docs/generated says is what the code says."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


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
