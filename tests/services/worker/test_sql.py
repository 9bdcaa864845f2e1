"""Scripts cut where Postgres would cut them, parameters found where Postgres would find them."""

from typing import Any

import pytest

from noetl_worker.tools.sql import bind, split_statements

ATOMIC = "CREATE FUNCTION f() BEGIN ATOMIC SELECT CASE WHEN true THEN 1 END; SELECT 2; END"


@pytest.mark.parametrize(
    ("script", "statements"),
    [
        ("SELECT 1", ["SELECT 1"]),
        ("SELECT 1; SELECT 2;", ["SELECT 1", "SELECT 2"]),
        (" ;; \n-- nothing\n; /* nor here */ ;", []),
        ("SELECT ';' ; SELECT 'it''s; fine'", ["SELECT ';'", "SELECT 'it''s; fine'"]),
        (r"SELECT E'a\';b'; SELECT 2", [r"SELECT E'a\';b'", "SELECT 2"]),
        (r"SELECT 'back\'; SELECT 2", [r"SELECT 'back\'", "SELECT 2"]),
        ('SELECT "a;""b"; SELECT 2', ['SELECT "a;""b"', "SELECT 2"]),
        ("SELECT 1 -- a; b\n; SELECT 2", ["SELECT 1 -- a; b", "SELECT 2"]),
        ("SELECT /* a; /* b; */ c; */ 1; SELECT 2", ["SELECT /* a; /* b; */ c; */ 1", "SELECT 2"]),
        ("DO $$ BEGIN x; END $$; SELECT 1", ["DO $$ BEGIN x; END $$", "SELECT 1"]),
        ("SELECT $a$ $$;$b$; $a$; SELECT 1", ["SELECT $a$ $$;$b$; $a$", "SELECT 1"]),
        ("SELECT $1; SELECT a$b$c", ["SELECT $1", "SELECT a$b$c"]),
        (f"{ATOMIC}; SELECT 3", [ATOMIC, "SELECT 3"]),
        ("BEGIN; SELECT 1; END; SELECT 2", ["BEGIN", "SELECT 1", "END", "SELECT 2"]),
        ("SELECT 'open; SELECT 2", ["SELECT 'open", "SELECT 2"]),
    ],
)
def test_a_script_is_cut_into(script: str, statements: list[str]) -> None:
    assert split_statements(script) == statements


@pytest.mark.parametrize(
    ("statement", "params", "text", "values"),
    [
        ("SELECT $1, $2", [1, 2], "SELECT $1, $2", [1, 2]),
        ("SELECT $1", [1, 2], "SELECT $1", [1]),
        ("SELECT %s, %s", [1, 2], "SELECT $1, $2", [1, 2]),
        ("SELECT :a, :b, :a", {"a": 1, "b": 2}, "SELECT $1, $2, $1", [1, 2]),
        ("SELECT %(a)s::text", {"a": 1}, "SELECT $1::text", [1]),
        ("SELECT ':a', x::int, \":a\" -- :a", {"a": 1}, "SELECT ':a', x::int, \":a\" -- :a", []),
        ("SELECT '$1'", [1], "SELECT '$1'", []),
        ("SELECT :a", None, "SELECT :a", []),
    ],
)
def test_parameters_are_numbered(statement: str, params: Any, text: str, values: list[Any]) -> None:
    assert bind(statement, params) == (text, values)


def test_a_parameter_without_a_value_is_named() -> None:
    with pytest.raises(LookupError, match="'b'"):
        bind("SELECT :b", {"a": 1})
    with pytest.raises(LookupError, match="reads 2"):
        bind("SELECT $2", [1])
