"""What the pages of a sequence come to together, by the rule of `retry.on_success`. Pure.

append    the items found at `merge_path` of every page, as one list
collect   the list of the pages
replace   the last page
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from noetl_core.domain.result_view import value_of


class PageRule(NamedTuple):
    collect: str = "append"
    merge_path: str = ""
    """Dotted, below the body of a page; empty is the body itself."""


def collected(rule: PageRule, documents: Iterable[Any]) -> Any:
    """The stored documents of the pages in order, as the one value that they are."""
    if rule.collect == "replace":
        last = None
        for document in documents:
            last = document
        return body_of(last)
    return [item for document in documents for item in items_of(rule, document)]


def items_of(rule: PageRule, document: Any) -> list[Any]:
    """What one page adds to the list, where the rule makes a list."""
    assert rule.collect != "replace", rule
    body = body_of(document)
    if rule.collect == "collect":
        return [body]
    found = _at(body, rule.merge_path)
    if found is None:
        return []
    return found if isinstance(found, list) else [found]


def body_of(document: Any) -> Any:
    """What the call answered: the body of an HTTP response, the value of anything else."""
    value = value_of(document)
    if isinstance(value, dict) and "status_code" in value and "data" in value:
        return value["data"]
    return value


def _at(value: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value
