"""`noetl sql`: questions to the archives, wherever they are, and nothing but questions."""

import json
from pathlib import Path

import pytest

from cli.stacks import Answer, noetl, noetl_process
from noetl_compactor.archive import archive_past
from noetl_core.blob.place import Place
from noetl_core.store.postgres import Pool, open_pool
from services.compactor.old_log import WEEK, a_week, an_execution, dies_at, rules
from support.s3 import SECRET_KEY


@pytest.fixture
async def archives(
    pool: Pool, database: str, place: Place, place_environment: dict[str, str]
) -> dict[str, str]:
    """Three executions of an old week, archived: how to find them."""
    await a_week(pool)
    for number in range(3):
        await an_execution(pool, number)
    async with open_pool(database, role="noetl_compactor", size_max=2) as compactor_pool:
        await archive_past(compactor_pool, rules(place))
    return place_environment


def asked(archives: dict[str, str], *arguments: str, **environ: str) -> Answer:
    return noetl("sql", *arguments, home=None, **archives, **environ)


def test_events_and_results_are_tables(archives: dict[str, str]) -> None:
    query = (
        "SELECT event_type, count(*) AS n, any_value(decode(inline)) AS body"
        " FROM event LEFT JOIN result_ref r ON r.ref_id = event_id"
        " GROUP BY 1 ORDER BY 1 LIMIT 1"
    )

    answer = asked(archives, query, "--json")

    assert answer.returncode == 0, answer.stderr
    (row,) = [json.loads(line) for line in answer.stdout.splitlines()]
    assert (row["event_type"], row["n"]) == ("call.done", 3)
    assert "number" in json.loads(row["body"])


def test_an_answer_for_people_is_a_table(archives: dict[str, str]) -> None:
    answer = asked(archives, "SELECT count(*) AS events FROM event")

    assert answer.stdout.split() == ["events", "12", "(1", "row)"]


def test_the_place_is_an_option_too(archives: dict[str, str]) -> None:
    place = archives["NOETL_ARCHIVE_DIR"]

    answer = asked(
        archives | {"NOETL_ARCHIVE_DIR": "/nowhere"},
        *("SELECT count(*) AS events FROM event", "--archive-dir", place),
    )

    assert answer.stdout.split() == ["events", "12", "(1", "row)"]


@pytest.mark.parametrize(("week", "events"), [(WEEK, 12), ("2020w01", 0)])
def test_a_question_can_be_about_some_weeks(
    archives: dict[str, str], week: str, events: int
) -> None:
    answer = asked(archives, "SELECT count(*) AS n FROM event", "--week", week, "--json")

    assert json.loads(answer.stdout) == {"n": events}


@pytest.mark.parametrize("week", ["2026w7", "2026-W07", "w07"])
def test_what_is_no_week_is_refused(archives: dict[str, str], week: str) -> None:
    answer = asked(archives, "SELECT count(*) AS n FROM event", "--week", week)

    assert answer.returncode == 2
    assert f"'{week}' is no week" in answer.stderr


@pytest.mark.parametrize(
    "query",
    [
        "DROP VIEW event",
        "COPY event TO 'stolen.csv'",
        "SELECT 1; SELECT 2",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM event, read_csv('/etc/passwd')",
        "SET enable_external_access = true",
        "SELECT * FROM nothing",
    ],
)
def test_nothing_else_can_be_asked(archives: dict[str, str], query: str) -> None:
    answer = asked(archives, query)

    assert answer.returncode == 2
    assert answer.stderr


async def test_no_question_writes_over_an_archive(archives: dict[str, str], place: Place) -> None:
    (name,) = [one for one in await place.names() if "event-" in one]
    before = await place.read(name)
    file = f"{archives['NOETL_ARCHIVE_DIR']}/{name}"
    write = f"COPY (SELECT 1 FROM event) TO '{file}' (FORMAT parquet, USE_TMP_FILE false)"

    answer = noetl_process("sql", f"EXPLAIN ANALYZE {write}", home=None, **archives)

    assert answer.returncode == 2, answer.stderr
    assert await place.read(name) == before


def test_without_an_archive_it_says_so(tmp_path: Path) -> None:
    answer = noetl("sql", "SELECT 1", "--archive-dir", tmp_path)

    assert answer.returncode == 1
    assert "there is no archive in" in answer.stderr
    assert "NOETL_COMPACTOR_ENABLED" in answer.stderr


async def test_what_is_still_being_written_is_not_shown(
    pool: Pool, database: str, place: Place, place_environment: dict[str, str]
) -> None:
    await a_week(pool)
    await an_execution(pool, 1)
    async with open_pool(database, role="noetl_compactor", size_max=2) as compactor_pool:
        with pytest.raises(Exception, match="recorded"):
            await archive_past(compactor_pool, rules(place, after=dies_at("recorded")))

    answer = noetl_process("sql", "SELECT 1", home=None, **place_environment)

    assert answer.returncode == 1
    assert "there is no archive in" in answer.stderr


def test_more_than_may_be_copied_here_is_refused(archives: dict[str, str]) -> None:
    answer = asked(archives, "SELECT count(*) FROM event", NOETL_ARCHIVE_COPIES_MB="0.001")

    if archives["NOETL_ARCHIVE_DIR"].startswith("s3://"):
        assert answer.returncode == 2
        assert "ask for fewer weeks (--week)" in answer.stderr
    else:
        assert answer.returncode == 0  # nothing is copied


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"NOETL_S3_ENDPOINT": "http://127.0.0.1:9"}, "NOETL_S3_ENDPOINT"),
        ({"NOETL_S3_ACCESS_KEY": "nobody"}, "NOETL_S3_ACCESS_KEY"),
        ({"NOETL_S3_SECRET_KEY": "wrong-secret"}, "NOETL_S3_SECRET_KEY"),
    ],
)
def test_an_s3_that_cannot_be_asked_is_named_and_no_secret_is(
    s3_environment: dict[str, str], wrong: dict[str, str], said: str
) -> None:
    environ = s3_environment | {"NOETL_ARCHIVE_DIR": "s3://noetl-test/any"} | wrong

    answer = noetl("sql", "SELECT 1", home=None, **environ)

    assert answer.returncode == 1
    assert said in answer.stderr
    assert SECRET_KEY not in answer.stderr
    assert "wrong-secret" not in answer.stderr


def test_a_place_that_is_neither_a_directory_nor_s3_is_refused() -> None:
    answer = noetl("sql", "SELECT 1", "--archive-dir", "gs://bucket/archive")

    assert answer.returncode == 2
    assert "s3://BUCKET/PREFIX" in answer.stderr
