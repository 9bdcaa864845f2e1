"""`noetl sql`: questions to the archives, and nothing but questions."""

import json
from pathlib import Path

import pytest

from cli.stacks import noetl
from noetl_compactor.archive import archive_past
from noetl_core.store.postgres import Pool, open_pool
from services.compactor.old_log import a_week, an_execution, dies_at, rules


@pytest.fixture
async def archives(pool: Pool, database: str, tmp_path: Path) -> Path:
    """Three executions of an old week, archived."""
    await a_week(pool)
    for number in range(3):
        await an_execution(pool, number)
    async with open_pool(database, role="noetl_compactor", size_max=2) as compactor_pool:
        await archive_past(compactor_pool, rules(tmp_path / "archive"))
    return tmp_path / "archive"


def test_events_and_results_are_tables(archives: Path) -> None:
    query = (
        "SELECT event_type, count(*) AS n, any_value(decode(inline)) AS body"
        " FROM event LEFT JOIN result_ref r ON r.ref_id = event_id"
        " GROUP BY 1 ORDER BY 1 LIMIT 1"
    )

    answer = noetl("sql", query, "--json", "--archive-dir", archives)

    assert answer.returncode == 0, answer.stderr
    (row,) = [json.loads(line) for line in answer.stdout.splitlines()]
    assert (row["event_type"], row["n"]) == ("call.done", 3)
    assert "number" in json.loads(row["body"])


def test_an_answer_for_people_is_a_table(archives: Path) -> None:
    answer = noetl("sql", "SELECT count(*) AS events FROM event", NOETL_ARCHIVE_DIR=str(archives))

    assert answer.stdout.split() == ["events", "12", "(1", "row)"]


@pytest.mark.parametrize(
    "query",
    [
        "DROP VIEW event",
        "COPY event TO 'stolen.csv'",
        "SELECT 1; SELECT 2",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SET enable_external_access = true",
        "SELECT * FROM nothing",
    ],
)
def test_nothing_else_can_be_asked(archives: Path, query: str) -> None:
    answer = noetl("sql", query, "--archive-dir", archives)

    assert answer.returncode == 2
    assert answer.stderr


def test_without_an_archive_it_says_so(tmp_path: Path) -> None:
    answer = noetl("sql", "SELECT 1", "--archive-dir", tmp_path)

    assert answer.returncode == 1
    assert "there is no archive in" in answer.stderr
    assert "NOETL_COMPACTOR_ENABLED" in answer.stderr


async def test_what_is_still_being_written_is_not_shown(
    pool: Pool, database: str, tmp_path: Path
) -> None:
    await a_week(pool)
    await an_execution(pool, 1)
    async with open_pool(database, role="noetl_compactor", size_max=2) as compactor_pool:
        with pytest.raises(Exception, match="recorded"):
            await archive_past(compactor_pool, rules(tmp_path, after=dies_at("recorded")))

    assert noetl("sql", "SELECT 1", "--archive-dir", tmp_path).returncode == 1
