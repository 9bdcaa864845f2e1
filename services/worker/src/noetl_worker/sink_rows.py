"""What a sink writes, as rows: from its `args`, or from the result of the step."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import msgspec

from noetl_core.domain.pages import PageRule, body_of, items_of
from noetl_worker.tools.tool import wrong_field

Row: TypeAlias = dict[str, Any]

_encode = msgspec.json.Encoder().encode


class Written(NamedTuple):
    """What a sink has done in this attempt."""

    rows: int = 0
    already_written: bool = False


def rows_of(args: Any, result: Any, *, merge_path: str = "") -> list[Row]:
    """`args`: one row or a list of them. Without, the rows that the step has read.

    `merge_path` is where a page has its rows, as `retry.on_success` says.
    """
    if args is not None:
        return _rows(args)
    return _rows(_rows_in(result, merge_path), "is missing, and the result of the step ")


def _rows_in(result: Any, merge_path: str) -> Any:
    """What a page adds to its list, the rows of a query, or the body of an answer itself."""
    if merge_path:
        return items_of(PageRule(merge_path=merge_path), result)
    body = body_of(result)
    if isinstance(body, Mapping) and isinstance(body.get("rows"), list):
        return body["rows"]
    return body


def _rows(value: Any, whose: str = "") -> list[Row]:
    listed = value if isinstance(value, list) else [value]
    for number, row in enumerate(listed, 1):
        if not isinstance(row, Mapping):
            found = "nothing" if row is None else f"a {type(row).__name__}"
            problem = f"has {found} as row {number}: a row is a mapping of columns to values"
            raise wrong_field("args", whose + problem)
        if not row:
            raise wrong_field("args", f"{whose}has no columns in row {number}")
    return listed


def with_key(rows: list[Row], key: tuple[str, ...]) -> Iterator[tuple[tuple[bytes, ...], Row]]:
    """Each row with the values of its key, in a form that can be compared."""
    for number, row in enumerate(rows, 1):
        missing = [name for name in key if row.get(name) is None]
        if missing:
            raise wrong_field("key", f"is {missing[0]!r}, but row {number} has no value for it")
        yield tuple(_encode(row[name]) for name in key), row


def once_each(rows: list[Row], key: tuple[str, ...]) -> list[Row]:
    """One row a key. Of several it has what writing one after the other would leave."""
    merged: dict[tuple[bytes, ...], Row] = {}
    for values, row in with_key(rows, key):
        merged[values] = {**merged[values], **row} if values in merged else row
    return list(merged.values())


def by_columns(rows: Iterable[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Rows with the same columns together: a column that a row does not name is left alone."""
    groups: dict[frozenset[str], list[Row]] = {}
    for row in rows:
        groups.setdefault(frozenset(row), []).append(row)
    return {tuple(group[0]): group for group in groups.values()}


def batches(rows: Iterable[Row], *, bytes_max: int) -> Iterator[str]:
    """Lists of rows in JSON, none much larger than `bytes_max`."""
    batch: list[bytes] = []
    size = 0
    for row in rows:
        encoded = _json(row)
        if batch and size + len(encoded) > bytes_max:
            yield _list(batch)
            batch, size = [], 0
        batch.append(encoded)
        size += len(encoded)
    if batch:
        yield _list(batch)


def _json(row: Row) -> bytes:
    try:
        return _encode(row)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise wrong_field("args", f"holds what is no plain data: {error}") from None


def _list(encoded: list[bytes]) -> str:
    return (b"[" + b",".join(encoded) + b"]").decode()
