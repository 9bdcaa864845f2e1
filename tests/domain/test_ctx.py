"""Patches of ctx: applied in any order they give the same, and nothing but JSON is in them."""

import itertools
from typing import Any

import pytest

from noetl_core.domain.ctx import as_recorded, compose, merge_ctx


def applied(*patches: dict[str, Any]) -> dict[str, Any]:
    ctx: dict[str, Any] = {"a": {"old": 0}}
    for patch in patches:
        merge_ctx(ctx, patch)
    return ctx


def test_a_path_reaches_into_mappings_and_makes_those_that_are_missing() -> None:
    assert applied({"a.b": 1, "x.y.z": 2}) == {"a": {"old": 0, "b": 1}, "x": {"y": {"z": 2}}}


def test_merging_leaves_the_mappings_of_the_patch_alone() -> None:
    patch = {"a": {"b": 1}}
    ctx: dict[str, Any] = {}

    merge_ctx(ctx, patch)
    merge_ctx(ctx, {"a.c": 2})

    assert patch == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a.b": 1}, {"a": {"c": 2}}),
        ({"a": {"c": 2}}, {"a.b": 1}),
        ({"a": 1}, {"a.b.c": 2}),
        ({"a.b": 1, "a.c.d": 2}, {"a.c": 3}),
        ({"a.b": 1}, {"a": {"x": 1}, "a.b": 2}),
        ({"ab": 1, "a": 2}, {"a.b": 3}),
    ],
)
def test_a_composed_patch_does_what_its_parts_do_in_any_order_of_its_keys(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    composed = compose(first, second)

    for keys in itertools.permutations(composed):
        assert applied({key: composed[key] for key in keys}) == applied(first, second)


def test_a_value_is_recorded_as_the_log_gives_it_back() -> None:
    recorded = as_recorded({1: (float("nan"), "a\0b", "\\u0000")})

    assert recorded == {"1": [None, "a\ufffdb", "\\u0000"]}


@pytest.mark.parametrize("value", [range(3), object(), "\ud800"])
def test_what_is_no_json_is_refused(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        as_recorded(value)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, {"a": [{"b": 2**70}]}, {2**70: 1}])
def test_a_number_beyond_64_bits_is_not_recorded_because_no_command_could_carry_it(
    value: Any,
) -> None:
    with pytest.raises(ValueError, match="beyond 64 bits"):
        as_recorded(value)


@pytest.mark.parametrize("value", [2**64 - 1, -(2**63), "1" * 40, 1e300, {"9" * 25: 1}])
def test_long_texts_and_numbers_up_to_64_bits_are_recorded(value: Any) -> None:
    assert as_recorded(value) == value
