"""YAML text as a tree in which every node knows its line and column.

Plain scalars are read as YAML 1.2 does (the core schema, which is JSON's types): `no`, `on`, `1:30`
and `2024-01-01` are texts. What a playbook says must be JSON, and the country code of Norway is not
false. Keys are always texts.

A document is bounded in bytes, depth and nodes. An alias counts as much as what it stands for, so a
small document cannot unfold into a large one.
"""

import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import msgspec
import yaml

from noetl_core.domain.errors import PlaybookInvalidError, Problem

DOCUMENT_BYTES_MAX = 1024 * 1024
DEPTH_MAX = 64
NODES_MAX = 100_000

_TOO_DEEP = f"a playbook may be {DEPTH_MAX} levels deep"

QUOTE_THE_TEMPLATE = 'quote the template: "{{ ... }}"'

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_DIGITS_MAX = 400
_BARE_TEMPLATE = re.compile(r"(?:^|[:,\[-])\s*\{\{")


class Node(msgspec.Struct, eq=False):
    """One value of the document. `text` is how a scalar was written."""

    line: int
    column: int
    size: int = 1
    depth: int = 1


class Scalar(Node, eq=False, kw_only=True):
    value: str | int | float | bool | None
    text: str


class Sequence(Node, eq=False):
    items: list[Node] = []


class Mapping(Node, eq=False):
    """`keys` has the node of each key, for its place."""

    items: dict[str, Node] = {}
    keys: dict[str, Node] = {}


def read_tree(text: str, *, file: str) -> tuple[Node, list[Problem]]:
    """The one document in the text, and what is wrong with its keys.

    Raises PlaybookInvalidError where there is no telling what the rest would mean.
    """
    try:
        return _read(text)
    except _RefusedError as refused:
        problem = refused.problem
    except yaml.YAMLError as error:
        problem = _syntax_problem(error, text)
    raise PlaybookInvalidError([problem], file=file)


def data_of(node: Node) -> Any:
    """The node as plain data."""
    match node:
        case Scalar(value=value):
            return value
        case Sequence(items=items):
            return [data_of(item) for item in items]
        case Mapping(items=fields):
            return {key: data_of(item) for key, item in fields.items()}
    raise AssertionError(node)


def describe(node: Node) -> str:
    """What a node is, for a message: `the text 'abc'`, `a list`."""
    match node:
        case Sequence():
            return "a list"
        case Mapping():
            return "a mapping"
        case Scalar(value=None):
            return "nothing"
        case Scalar(value=bool(), text=text):
            return f"the bool {text}"
        case Scalar(value=int() | float(), text=text):
            return f"the number {text}"
        case Scalar(text=text):
            return f"the text {_shortened(text)!r}"
    raise AssertionError(node)


_SHOWN_MAX = 40


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."


class _RefusedError(Exception):
    def __init__(self, message: str, *, line: int, column: int) -> None:
        super().__init__(message)
        self.problem = Problem(message=message, line=line, column=column)


class _Open:
    """A collection whose end has not come yet."""

    def __init__(
        self, node: Sequence | Mapping, anchor: str | None, problems: list[Problem]
    ) -> None:
        self.node = node
        self.anchor = anchor
        self._problems = problems
        self._key: Node | None = None
        self._merged: list[Node] = []

    def add(self, child: Node) -> None:
        self.node.size += child.size
        self.node.depth = max(self.node.depth, child.depth + 1)
        if self.node.size > NODES_MAX:
            _refuse(child, f"a playbook may have up to {NODES_MAX} values, aliases unfolded")
        if self.node.depth > DEPTH_MAX:
            _refuse(child, _TOO_DEEP)
        if isinstance(self.node, Sequence):
            self.node.items.append(child)
        elif self._key is None:
            self._key = child
        else:
            self._add_field(self.node, self._key, child)
            self._key = None

    def _add_field(self, mapping: Mapping, key: Node, value: Node) -> None:
        if not isinstance(key, Scalar):
            self._report(key, "a key must be a text", hint=QUOTE_THE_TEMPLATE)
        elif key.text == "<<":
            self._merged.append(value)
        elif key.text in mapping.items:
            first = mapping.keys[key.text].line
            message = f"the key `{key.text}` was given in line {first} already"
            self._report(key, message, key=key.text)
        else:
            mapping.items[key.text] = value
            mapping.keys[key.text] = key

    def close(self) -> Node:
        """`<<: *base` adds those fields of another mapping that this one does not have."""
        for source in self._merged:
            for mapping in source.items if isinstance(source, Sequence) else [source]:
                if not isinstance(mapping, Mapping):
                    self._report(mapping, "`<<` takes a mapping, or a list of them", key="<<")
                elif isinstance(self.node, Mapping):
                    self.node.items = mapping.items | self.node.items
                    self.node.keys = mapping.keys | self.node.keys
        return self.node

    def _report(self, node: Node, message: str, *, key: str = "", hint: str = "") -> None:
        self._problems.append(
            Problem(message=message, line=node.line, column=node.column, key=key, hint=hint)
        )


class _Builder:
    """Builds the tree from the parser's events, without recursion."""

    def __init__(self) -> None:
        self.root: Node | None = None
        self.problems: list[Problem] = []
        self._open: list[_Open] = []
        self._anchors: dict[str, Node | None] = {}
        """None for a collection that is still open."""

    def take(self, event: Any) -> None:
        match event:
            case yaml.ScalarEvent():
                self._add(_scalar(event), event.anchor)
            case yaml.AliasEvent():
                self._add(self._aliased(event), None)
            case yaml.SequenceStartEvent():
                self._begin(Sequence(*_place(event)), event.anchor)
            case yaml.MappingStartEvent():
                self._begin(Mapping(*_place(event)), event.anchor)
            case yaml.CollectionEndEvent():
                closed = self._open.pop()
                self._add(closed.close(), closed.anchor)
            case yaml.DocumentStartEvent() if self.root is not None:
                _refuse(Node(*_place(event)), "a file holds one playbook: a second begins here")

    def _begin(self, node: Sequence | Mapping, anchor: str | None) -> None:
        if len(self._open) == DEPTH_MAX:
            _refuse(node, _TOO_DEEP)
        if anchor is not None:
            self._anchors[anchor] = None
        self._open.append(_Open(node, anchor, self.problems))

    def _add(self, node: Node, anchor: str | None) -> None:
        if anchor is not None:
            self._anchors[anchor] = node
        if self._open:
            self._open[-1].add(node)
        else:
            self.root = node

    def _aliased(self, event: Any) -> Node:
        node = self._anchors.get(event.anchor)
        if node is None:
            inside = "stands inside itself" if event.anchor in self._anchors else "has no anchor"
            _refuse(Node(*_place(event)), f"the alias `*{event.anchor}` {inside}")
        return node


def _read(text: str) -> tuple[Node, list[Problem]]:
    _check_text(text)
    builder = _Builder()
    for event in _events(text):
        builder.take(event)
    if builder.root is None or (isinstance(builder.root, Scalar) and builder.root.value is None):
        raise _RefusedError("the document is empty", line=1, column=1)
    return builder.root, builder.problems


def _check_text(text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _RefusedError("the document is not valid Unicode", line=1, column=1) from None
    if size > DOCUMENT_BYTES_MAX:
        message = f"a playbook may have up to {DOCUMENT_BYTES_MAX} bytes; this one has {size}"
        raise _RefusedError(message, line=1, column=1)


def _events(text: str) -> Iterator[Any]:
    # yaml.parse() leaves its loader open when a consumer stops early, hence the loop by hand.
    loader = _LOADER(text)
    try:
        while loader.check_event():
            yield loader.get_event()
    finally:
        loader.dispose()


def _scalar(event: Any) -> Scalar:
    line, column = _place(event)
    text: str = event.value
    plain, _ = event.implicit
    tag = event.tag
    if tag is None or tag == "!":
        value = _resolved(text) if plain else text
    elif tag == f"{_TAG}str":
        value = text
    else:
        value = _resolved(text)
        if tag not in _TAGS.get(type(value), ()):
            _refuse(Node(line, column), f"the tag `{tag.removeprefix(_TAG)}` is not supported here")
    return Scalar(line, column, value=value, text=text)


_TAGS: dict[type, tuple[str, ...]] = {
    int: (f"{_TAG}int", f"{_TAG}float"),
    float: (f"{_TAG}float",),
    bool: (f"{_TAG}bool",),
    type(None): (f"{_TAG}null",),
}


def _resolved(text: str) -> str | int | float | bool | None:
    """The value of a plain scalar in the core schema of YAML 1.2."""
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if len(text) > _DIGITS_MAX:
        return text
    if _INT.fullmatch(text):
        return int(text, 0) if text[1:2] in {"o", "x"} else int(text)
    if _FLOAT.fullmatch(text):
        number = float(text)
        return number if math.isfinite(number) else text
    return text


def _place(event: Any) -> tuple[int, int]:
    return event.start_mark.line + 1, event.start_mark.column + 1


def _refuse(node: Node, message: str) -> NoReturn:
    raise _RefusedError(message, line=node.line, column=node.column)


def _syntax_problem(error: yaml.YAMLError, text: str) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    reason = getattr(error, "problem", None) or str(error).splitlines()[0]
    line, column = (1, 1) if mark is None else (mark.line + 1, mark.column + 1)
    lines = text.splitlines()
    near = lines[max(0, line - 2) : line]
    hint = QUOTE_THE_TEMPLATE if any(_BARE_TEMPLATE.search(each) for each in near) else ""
    return Problem(message=f"this is not YAML: {reason}", line=line, column=column, hint=hint)
