"""A payload lies over a workload."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from noetl_core.domain.merge import deep_merge

DATA = st.dictionaries(
    st.sampled_from("abc"),
    st.recursive(
        st.none() | st.integers() | st.lists(st.integers(), max_size=2),
        lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        max_leaves=8,
    ),
)


def test_mappings_merge_and_everything_else_replaces() -> None:
    base = {"api": {"url": "x", "retries": 3}, "ids": [1, 2], "name": "n"}
    over = {"api": {"url": "y"}, "ids": [3], "more": None}

    assert deep_merge(base, over) == {
        "api": {"url": "y", "retries": 3},
        "ids": [3],
        "name": "n",
        "more": None,
    }


@given(DATA, DATA)
def test_neither_argument_is_changed(base: dict[str, Any], over: dict[str, Any]) -> None:
    before = repr((base, over))

    deep_merge(base, over)

    assert repr((base, over)) == before


@given(DATA, DATA)
def test_what_lies_over_wins(base: dict[str, Any], over: dict[str, Any]) -> None:
    merged = deep_merge(base, over)

    assert merged.keys() == base.keys() | over.keys()
    assert all(merged[key] == value for key, value in over.items() if not isinstance(value, dict))
    assert all(merged[key] == base[key] for key in base.keys() - over.keys())


@given(DATA)
def test_nothing_over_or_under_changes_nothing(data: dict[str, Any]) -> None:
    assert deep_merge(data, {}) == deep_merge({}, data) == deep_merge(data, data) == data
