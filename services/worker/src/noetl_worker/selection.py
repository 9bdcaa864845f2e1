"""`output.select`: what is kept of a result, by dotted paths.

The shape stays: `["paging.total", "rows.id"]` of `{paging: {total, page}, rows: [{id, name}]}` is
`{paging: {total}, rows: [{id}]}`. Through a list a path goes into each of its elements. What a path
does not find is not there.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

_Tree: TypeAlias = dict[str, "_Tree"]
"""Names and what is wanted below them; nothing more said means all of it."""

_DATA = "data"


def select(value: Any, paths: Iterable[str]) -> Any:
    tree = _tree(paths)
    # Templates may write `s.data.total` for `s.total`, and so may a path.
    if _DATA in tree and not (isinstance(value, dict) and _DATA in value):
        below = tree.pop(_DATA)
        if not below:
            return value
        tree = {**below, **tree}
    return _kept(value, tree)


def _tree(paths: Iterable[str]) -> _Tree:
    tree: _Tree = {}
    # The shorter path first: whoever wants all of `a` gets it, whatever else is said about `a.b`.
    for path in sorted(paths, key=len):
        inner, names = tree, path.split(".")
        for name in names:
            if name in inner and not inner[name]:
                break
            inner = inner.setdefault(name, {})
    return tree


def _kept(value: Any, tree: _Tree) -> Any:
    if not tree:
        return value
    if isinstance(value, list):
        return [_kept(item, tree) for item in value]
    if not isinstance(value, dict):
        return {}
    found = {name: (value[name], below) for name, below in tree.items() if name in value}
    return {
        name: _kept(item, below)
        for name, (item, below) in found.items()
        if not below or isinstance(item, dict | list)
    }
