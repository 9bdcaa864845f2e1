"""SQL text cut into statements, and its named parameters turned into numbered ones.

Knows what PostgreSQL's own lexer knows about where text is code: quotes, escape strings, quoted
names, dollar quotes, comments (block comments nest), and the body of a `BEGIN ATOMIC` function.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_SPAN = re.compile(
    r"""
      (?P<comment> --[^\n]* )
    | (?P<block> /\* )
    | (?P<string> [eE]'(?:[^'\\]|\\.|'')*+' | '(?:[^']|'')*+' )
    | (?P<name> "(?:[^"]|"")*+" )
    | (?P<dollar> \$(?P<tag>(?:[A-Za-z_\u0080-\uffff][\w\u0080-\uffff]*)?)\$ )
    | (?P<word> [A-Za-z_\u0080-\uffff][\w$\u0080-\uffff]* )
    | (?P<cast> :: )
    | (?P<named> :[A-Za-z_]\w* | %\([A-Za-z_]\w*\)s )
    | (?P<next> %s )
    | (?P<numbered> \$\d+ )
    | (?P<number> \d[\w.]* )
    | (?P<end> ; )
    """,
    re.VERBOSE | re.DOTALL,
)
_BLOCK_EDGE = re.compile(r"/\*|\*/")
_ROUTINES = frozenset({"function", "procedure"})


class Piece(NamedTuple):
    """A stretch of SQL: `code` is everything that has no other kind."""

    kind: str
    text: str


def split_statements(text: str) -> list[str]:
    """The statements of a script, without their semicolons; empty ones are left out."""
    statements: list[str] = []
    current: list[Piece] = []
    body = _RoutineBody()
    for piece in pieces(text):
        if piece.kind == "end" and not body.is_open:
            statements.append(_text_of(current))
            current, body = [], _RoutineBody()
            continue
        current.append(piece)
        if piece.kind == "word":
            body.see(piece.text.lower())
    statements.append(_text_of(current))
    return [statement for statement in statements if statement]


def bind(statement: str, params: Sequence[Any] | Mapping[str, Any] | None) -> tuple[str, list[Any]]:
    """The statement with `$1, $2, ...` and the values for them, in order.

    A list is read by `$1` or by `%s`, a mapping by `:name` or `%(name)s`. Raises LookupError for a
    parameter that was not given.
    """
    if not params:
        return statement, []
    if isinstance(params, Mapping):
        return _bind_named(statement, params)
    return _bind_listed(statement, params)


def pieces(text: str) -> Iterator[Piece]:
    at = 0
    while (match := _SPAN.search(text, at)) is not None:
        if match.start() > at:
            yield Piece("code", text[at : match.start()])
        kind, end = match.lastgroup or "", match.end()
        if match["block"] is not None:
            kind, end = "comment", _end_of_block(text, end)
        elif match["dollar"] is not None:
            kind, end = "string", _end_of_dollar(text, match["dollar"], end)
        yield Piece(kind, text[match.start() : end])
        at = end
    if at < len(text):
        yield Piece("code", text[at:])


class _RoutineBody:
    """Whether we are inside `BEGIN ATOMIC ... END`, where a semicolon ends nothing."""

    def __init__(self) -> None:
        self._words: list[str] = []
        self._depth = 0
        self._last = ""

    @property
    def is_open(self) -> bool:
        return self._depth > 0

    def see(self, word: str) -> None:
        if len(self._words) < 4:  # noqa: PLR2004 - create or replace function
            self._words.append(word)
        if self._words[0] == "create" and _ROUTINES & set(self._words):
            self._count(word)
        self._last = word

    def _count(self, word: str) -> None:
        if (word == "atomic" and self._last == "begin") or (self._depth and word == "case"):
            self._depth += 1
        elif self._depth and word == "end":
            self._depth -= 1


def _text_of(found: list[Piece]) -> str:
    """Nothing, when there is no more than comments."""
    if all(piece.kind == "comment" or piece.text.isspace() for piece in found):
        return ""
    return "".join(piece.text for piece in found).strip()


def _end_of_block(text: str, at: int) -> int:
    depth = 1
    while depth and (edge := _BLOCK_EDGE.search(text, at)) is not None:
        depth += 1 if edge[0] == "/*" else -1
        at = edge.end()
    return at if not depth else len(text)


def _end_of_dollar(text: str, quote: str, at: int) -> int:
    closing = text.find(quote, at)
    return len(text) if closing < 0 else closing + len(quote)


def _bind_named(statement: str, params: Mapping[str, Any]) -> tuple[str, list[Any]]:
    numbers: dict[str, int] = {}
    written: list[str] = []
    for piece in pieces(statement):
        if piece.kind == "named":
            name = piece.text.strip(":%()").removesuffix(")s")
            if name not in params:
                raise LookupError(f"has no value for the parameter {name!r}")
            number = numbers.setdefault(name, len(numbers) + 1)
            written.append(f"${number}")
        else:
            written.append(piece.text)
    return "".join(written), [params[name] for name in numbers]


def _bind_listed(statement: str, params: Sequence[Any]) -> tuple[str, list[Any]]:
    written: list[str] = []
    used = following = 0
    for piece in pieces(statement):
        if piece.kind == "next":
            following += 1
            written.append(f"${following}")
        else:
            written.append(piece.text)
        if piece.kind == "numbered":
            used = max(used, int(piece.text[1:]))
    count = max(used, following)
    if count > len(params):
        raise LookupError(f"has {len(params)} values, but the statement reads {count}")
    return "".join(written), list(params[:count])
