"""A migration file, read: its statements one by one, and how they are to be applied.

    -- noetl: no transaction          as a line of its own, before the first statement

says that the statements are applied each by itself, because one of them cannot be in a transaction
(CREATE INDEX CONCURRENTLY) or must not hold its locks until the next one is done (VALIDATE
CONSTRAINT). Without the line a file is one transaction.
"""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from noetl_core.domain.errors import NoetlError

NO_TRANSACTION = "-- noetl: no transaction"
TITLE_CHARACTERS_MAX = 100

# A semicolon ends a statement unless it is part of a comment, of a quoted text or name, or of a
# dollar-quoted body. (The body of a function in BEGIN ATOMIC ... END is not understood: quote it.)
_PIECE = re.compile(
    r"(?P<comment>--[^\n]*|/\*.*?\*/)"
    r"|(?P<quoted>\bE'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\""
    r"|\$(?P<tag>[A-Za-z_]\w*|)\$.*?\$(?P=tag)\$)"
    r"|(?P<end>;)",
    re.DOTALL | re.IGNORECASE,
)
_CONCURRENTLY = re.compile(r"(CREATE|DROP)\s+(UNIQUE\s+)?INDEX\s+CONCURRENTLY\b", re.IGNORECASE)
_DROP = re.compile(r"DROP\s+INDEX\s+CONCURRENTLY\b", re.IGNORECASE)
_DROP_IF_EXISTS = re.compile(_DROP.pattern + r"\s+IF\s+EXISTS\b", re.IGNORECASE)


class MigrationInvalidError(NoetlError):
    """The file cannot be applied as it is written: its author has to mend it."""


class Statement(NamedTuple):
    number: int
    line: int
    text: str
    """Without the comments around it; the first word is the first word of the SQL."""

    @property
    def title(self) -> str:
        line = " ".join(self.text.split())
        is_short = len(line) <= TITLE_CHARACTERS_MAX
        return line if is_short else line[: TITLE_CHARACTERS_MAX - 3] + "..."

    @property
    def is_concurrent(self) -> bool:
        """It waits for the transactions of others and keeps nobody waiting: it needs no hurry."""
        return _CONCURRENTLY.match(self.text) is not None

    @property
    def is_drop(self) -> bool:
        return _DROP.match(self.text) is not None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


class Migration(NamedTuple):
    name: str
    sha256: str
    statements: tuple[Statement, ...]
    is_transaction: bool


def migrations_directory() -> Path:
    """Inside an installed package, else in the checkout."""
    packaged = Path(__file__).parents[1] / "migrations"
    if packaged.is_dir():
        return packaged
    checkout = Path(__file__).parents[5] / "schema" / "migrations"
    assert checkout.is_dir(), checkout
    return checkout


def read_migrations(directory: Path) -> list[Migration]:
    """All of a directory, in the order in which they are applied."""
    return [read_migration(file) for file in sorted(directory.glob("*.sql"))]


def read_migration(file: Path) -> Migration:
    text = file.read_text(encoding="utf-8")
    statements = tuple(split(text))
    head = text.splitlines()[: statements[0].line - 1] if statements else []
    is_transaction = NO_TRANSACTION not in (line.strip() for line in head)
    for statement in statements:
        _check(file.name, statement, is_transaction=is_transaction)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Migration(file.name, digest, statements, is_transaction)


def _check(name: str, statement: Statement, *, is_transaction: bool) -> None:
    if statement.is_concurrent and is_transaction:
        raise MigrationInvalidError(
            f"{name}, line {statement.line}: what is done CONCURRENTLY cannot be in a transaction."
            f" Put the line `{NO_TRANSACTION}` at the top of the file."
        )
    if statement.is_drop and not _DROP_IF_EXISTS.match(statement.text):
        raise MigrationInvalidError(
            f"{name}, line {statement.line}: write DROP INDEX CONCURRENTLY IF EXISTS. It may have"
            " been dropped by a run that died before it could say so."
        )


def split(text: str) -> Iterator[Statement]:
    number, place, begin = 0, 0, None
    for piece in _PIECE.finditer(text):
        if begin is None:
            begin = _first_word(
                text, place, piece.start() if piece["quoted"] is None else piece.end()
            )
        if piece["end"] is not None and begin is not None:
            number += 1
            yield _statement(text, number, begin, piece.start())
            begin = None
        place = piece.end()
    begin = _first_word(text, place, len(text)) if begin is None else begin
    if begin is not None:
        yield _statement(text, number + 1, begin, len(text))


def _first_word(text: str, begin: int, end: int) -> int | None:
    blank = len(text[begin:end]) - len(text[begin:end].lstrip())
    return None if begin + blank == end else begin + blank


def _statement(text: str, number: int, begin: int, end: int) -> Statement:
    return Statement(number, text.count("\n", 0, begin) + 1, text[begin:end].strip())
