"""noetl shards, noetl shards resize."""

import json
from collections.abc import Iterator

import pytest

from cli.stacks import DevStack, dev_stack, noetl


@pytest.fixture(scope="module")
def own_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    """Not the one of the others: the number of its shards changes here."""
    with dev_stack(tmp_path_factory.mktemp("shards") / "data") as running:
        yield running


def test_shards_shows_every_shard_with_its_owner(own_stack: DevStack) -> None:
    table = noetl("shards", url=own_stack.url)
    found = json.loads(noetl("shards", "--json", url=own_stack.url).stdout)

    assert table.returncode == 0, table.stderr
    assert table.stdout.startswith("16 shards")
    assert len(table.stdout.splitlines()) == 2 + 32
    assert len(found["shards"]) == 32


def test_resize_returns_when_the_count_has_changed(own_stack: DevStack) -> None:
    answer = noetl("shards", "resize", "16", "20", url=own_stack.url)
    found = json.loads(noetl("shards", "--json", url=own_stack.url).stdout)

    assert answer.returncode == 0, answer.stderr
    assert found["count"] == 20
    assert found["resize"]["drained_at"] is not None


def test_resize_from_a_wrong_count_says_what_the_count_is(own_stack: DevStack) -> None:
    answer = noetl("shards", "resize", "7", "20", url=own_stack.url)

    assert answer.returncode == 2
    assert "shards, not 7" in answer.stderr
