"""Pages of a sequence become one value."""

from typing import Any

import pytest

from noetl_core.domain.pages import PageRule, collected
from noetl_core.domain.result_view import StepDocument


def http(body: Any) -> dict[str, Any]:
    return {"status_code": 200, "headers": {}, "data": body}


@pytest.mark.parametrize(
    ("merge_path", "pages", "expected"),
    [
        ("", [[1, 2], [], [3]], [1, 2, 3]),
        ("", [http([1]), http([2, 3])], [1, 2, 3]),
        ("", [{"a": 1}, None, 5], [{"a": 1}, 5]),
        ("data", [http({"data": [1]}), http({"data": [2]})], [1, 2]),
        ("data.rows", [{"data": {"rows": [1]}}, {"data": {"rows": [2]}}], [1, 2]),
        ("data", [{"data": [1]}, {"data": {"id": 2}}, {"data": None}, {}, [3]], [1, {"id": 2}]),
        ("data.rows", [{"data": 1}, {"data": {"rows": [0]}}], [0]),
        ("data", [], []),
    ],
)
def test_append_joins_the_lists_found_at_the_path(
    merge_path: str, pages: list[Any], expected: list[Any]
) -> None:
    assert collected(PageRule("append", merge_path), pages) == expected


def test_collect_is_the_list_of_bodies_whatever_they_are() -> None:
    pages = [http({"n": 1}), [2], None]

    assert collected(PageRule("collect", "ignored"), pages) == [{"n": 1}, [2], None]


def test_replace_is_the_last_body() -> None:
    assert collected(PageRule("replace"), [http({"n": 1}), http({"n": 2})]) == {"n": 2}
    assert collected(PageRule("replace"), []) is None


def test_an_object_with_data_is_a_response_only_if_it_has_a_status_code() -> None:
    assert collected(PageRule("replace"), [{"data": [1], "next": 2}]) == {"data": [1], "next": 2}


def test_the_page_of_a_pipeline_is_the_value_of_its_last_task() -> None:
    page = StepDocument(data=http([1]), task="fetch", earlier={"login": "ok"})

    assert collected(PageRule(), [page, StepDocument(data=[2], meta={"attempts": 2})]) == [1, 2]
