"""store/migration_file.py: a file comes apart into its statements, and says how to apply them."""

from pathlib import Path

import pytest

from noetl_core.store.migration_file import (
    NO_TRANSACTION,
    MigrationInvalidError,
    read_migration,
    split,
)


def texts(sql: str) -> list[str]:
    return [statement.text for statement in split(sql)]


def written(directory: Path, sql: str) -> Path:
    file = directory / "0001_sample.sql"
    file.write_text(sql)
    return file


@pytest.mark.parametrize(
    "whole",
    [
        "SELECT 'a;b', 'it''s; this', E'a\\';b'",
        'SELECT ";" AS "a;""b"',
        "SELECT 1 -- a comment; with one\n + 1",
        "SELECT 1 /* and; another */ + 1",
        "CREATE FUNCTION f() RETURNS void LANGUAGE plpgsql AS $$ BEGIN; $x$ ; $x$; END $$",
        "DO $body$ BEGIN PERFORM $$;$$; END $body$",
        "SELECT $1 + $2",
    ],
)
def test_a_semicolon_inside_something_ends_no_statement(whole: str) -> None:
    assert texts(f"{whole}; SELECT 2;") == [whole, "SELECT 2"]


def test_comments_and_blanks_between_statements_are_no_statements() -> None:
    assert texts("-- one\n;; SELECT 1 ; /* two */ \n;\n SELECT 2 -- end") == [
        "SELECT 1",
        "SELECT 2 -- end",
    ]


def test_a_statement_knows_its_number_and_its_line() -> None:
    first, second = split("-- why\n\nSELECT 1;\n-- and\nSELECT\n2;")

    assert (first.number, first.line) == (1, 3)
    assert (second.number, second.line, second.title) == (2, 5, "SELECT 2")


def test_a_file_is_one_transaction_unless_it_says_otherwise_before_its_first_statement(
    tmp_path: Path,
) -> None:
    plain = read_migration(written(tmp_path, "SELECT 1;"))
    late = read_migration(written(tmp_path, f"SELECT 1;\n{NO_TRANSACTION}\n"))
    marked = read_migration(written(tmp_path, f"-- why\n{NO_TRANSACTION}\n\nSELECT 1;"))

    assert (plain.is_transaction, late.is_transaction, marked.is_transaction) == (True, True, False)


def test_what_is_concurrent_is_refused_in_a_transaction(tmp_path: Path) -> None:
    file = written(tmp_path, "-- why\nCREATE INDEX CONCURRENTLY a ON noetl.event (event_id);")

    with pytest.raises(MigrationInvalidError, match=f"line 2.*`{NO_TRANSACTION}`"):
        read_migration(file)


def test_a_concurrent_drop_that_cannot_be_repeated_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, f"{NO_TRANSACTION}\nDROP INDEX CONCURRENTLY noetl.event_key_idx;")

    with pytest.raises(MigrationInvalidError, match="IF EXISTS"):
        read_migration(file)
