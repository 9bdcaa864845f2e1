"""Rewriting a YAML tree: what is moved or renamed keeps the line and column where it stood."""

from collections.abc import Iterable
from collections.abc import Mapping as Map

from jinja2 import TemplateSyntaxError

from noetl_core.domain.errors import TemplateError
from noetl_core.domain.reader import Report
from noetl_core.domain.sandbox import Sandbox
from noetl_core.domain.template import compile_template, is_template
from noetl_core.domain.yaml_tree import Mapping, Node, Scalar, Sequence

_lexer = Sandbox()


class Draft:
    """A copy of a mapping that is being rewritten. The tree itself never changes: anchors share."""

    def __init__(self, node: Mapping) -> None:
        self.node = node
        self.items = dict(node.items)
        self.keys = dict(node.keys)

    def get(self, name: str) -> Node | None:
        """The node of a field that is there and not null."""
        node = self.items.get(name)
        return None if isinstance(node, Scalar) and node.value is None else node

    def take(self, name: str) -> Node | None:
        """Like `get`, and the field is gone."""
        node = self.get(name)
        self.items.pop(name, None)
        return node

    def key(self, name: str) -> Node:
        """The place of a key, also of one that was taken."""
        return self.keys.get(name, self.node)

    def put(self, name: str, value: Node, *, key: Node | None = None) -> None:
        self.items[name] = value
        self.keys[name] = key or self.keys.get(name) or value

    def rename(self, report: Report, old: str, new: str) -> None:
        """A second spelling of a field; both at once are one too many."""
        value = self.take(old)
        if value is None:
            return
        if self.get(new) is not None:
            message = f"`{old}` and `{new}` say the same: give one of them"
            report.add(self.key(old), message, key=old)
        else:
            self.put(new, value, key=self.key(old))

    def move(self, names: Iterable[str], target: "Draft") -> None:
        for name in names:
            if name in self.items:
                target.put(name, self.items.pop(name), key=self.key(name))

    def finished(self) -> Mapping:
        keys = {name: self.keys[name] for name in self.items}
        return Mapping(self.node.line, self.node.column, items=self.items, keys=keys)


def empty_at(place: Node) -> Draft:
    return Draft(Mapping(place.line, place.column))


def text_at(place: Node, text: str) -> Scalar:
    return Scalar(place.line, place.column, value=text, text=text)


def list_at(place: Node, items: list[Node]) -> Sequence:
    return Sequence(place.line, place.column, items=items)


def text_of(node: Node | None) -> str | None:
    """The text of a scalar that is a text."""
    return node.value if isinstance(node, Scalar) and isinstance(node.value, str) else None


def expression_of(guard: Node) -> str | None:
    """What stands in a guard that is exactly one `{{ expression }}`, or a constant; else None."""
    if not isinstance(guard, Scalar):
        return None
    if isinstance(guard.value, bool):
        return guard.text.lower()
    tokens = _tokens(guard.text.strip())
    kinds = [kind for kind, _ in tokens]
    if kinds[:1] != ["variable_begin"] or kinds[-1:] != ["variable_end"] or "data" in kinds:
        return None
    inner = tokens[1:-1]
    if any(kind in {"variable_begin", "block_begin", "comment_begin"} for kind, _ in inner):
        return None
    return "".join(text for _, text in inner).strip()


def with_names(node: Node, names: Map[str, str]) -> Node:
    """The tree with names in its templates replaced, wherever they are looked up by templates."""
    match node:
        case Scalar(value=str() as text) if is_template(text):
            return text_at(node, _renamed(text, names))
        case Sequence(items=items):
            return list_at(node, [with_names(item, names) for item in items])
        case Mapping():
            draft = Draft(node)
            draft.items = {key: with_names(item, names) for key, item in node.items.items()}
            return draft.finished()
    return node


def _renamed(text: str, names: Map[str, str]) -> str:
    try:
        read = compile_template(text).roots & names.keys()
    except TemplateError:
        return text  # Whoever compiles it next says what is wrong with it.
    if not read:
        return text
    tokens = _tokens(text)
    words = [number for number, (kind, _) in enumerate(tokens) if kind != "whitespace"]
    for before, number, after in zip([0, *words], words, [*words[1:], 0], strict=False):
        kind, word = tokens[number]
        if kind == "name" and word in read and _is_looked_up(tokens[before][1], tokens[after][1]):
            tokens[number] = (kind, names[word])
    return "".join(word for _, word in tokens)


def _is_looked_up(before: str, after: str) -> bool:
    """Not so a field, a filter, a test, or the name of an argument."""
    return before not in {".", "|", "is"} and after != "="


def _tokens(text: str) -> list[tuple[str, str]]:
    """The template in pieces that together are the text again."""
    try:
        return [(kind, value) for _, kind, value in _lexer.lex(text)]
    except TemplateSyntaxError:
        return []
