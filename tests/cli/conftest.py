"""One running `noetl dev` for all tests that only use it."""

from collections.abc import Iterator

import pytest

from cli.stacks import DevStack, dev_stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    with dev_stack(tmp_path_factory.mktemp("stack") / "data") as running:
        yield running
