"""validate, register, status, events, executions, credential, db, version, --help."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cli.stacks import DevStack, noetl

PLAYBOOK = """\
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: seen, path: tests/seen}
workflow:
  - step: first
    tool: {kind: noop}
    next: {arcs: [{step: second}]}
  - step: second
    tool: {kind: noop}
"""

BAD = """\
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: bad}
workflow:
  - step: first
    tol: {kind: noop}
    next:
      arcs:
        - {step: nowhere}
"""


@pytest.fixture
def playbook(tmp_path: Path) -> Path:
    file = tmp_path / "seen.yaml"
    file.write_text(PLAYBOOK)
    return file


def test_validate_names_file_line_column_key_and_the_nearest_valid_key(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(BAD)

    answer = noetl("validate", file)

    assert answer.returncode == 2
    assert f"{file}:6:5: " in answer.stderr
    assert "`tol`" in answer.stderr
    assert "`tool`" in answer.stderr


def test_validate_checks_every_file_and_praises_the_good_ones(
    tmp_path: Path, playbook: Path
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(BAD)

    answer = noetl("validate", bad, playbook, tmp_path / "missing.yaml")

    assert answer.returncode == 2
    assert answer.stdout == f"{playbook}: valid\n"
    assert "missing.yaml" in answer.stderr
    assert noetl("validate", playbook).returncode == 0


def test_an_execution_can_be_looked_at_from_all_sides(stack: DevStack, playbook: Path) -> None:
    run = json.loads(noetl("run", playbook, "--json", url=stack.url).stdout)
    execution_id = run["execution_id"]

    status = noetl("status", execution_id, url=stack.url)
    assert "COMPLETED tests/seen" in status.stdout
    assert json.loads(noetl("status", execution_id, "--json", url=stack.url).stdout)["status"] == (
        "COMPLETED"
    )

    lines = noetl("events", execution_id, "--json", url=stack.url).stdout.splitlines()
    types = [json.loads(line)["event_type"] for line in lines]
    assert types[0] == "execution.started"
    assert types[-1] == "execution.completed"
    assert types.count("step.enter") == 2
    assert "execution.completed" in noetl("events", execution_id, url=stack.url).stdout

    listed = json.loads(noetl("executions", "--json", url=stack.url).stdout)
    assert execution_id in [view["execution_id"] for view in listed]
    assert execution_id in noetl("executions", url=stack.url).stdout


@pytest.mark.parametrize("command", ["status", "events", "cancel"])
def test_an_unknown_execution_is_said_to_be_unknown(stack: DevStack, command: str) -> None:
    answer = noetl(command, "12345", url=stack.url)

    assert answer.returncode == 2
    assert "12345" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_credential_goes_in_is_listed_without_its_data_and_goes_away(
    stack: DevStack, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"dsn": "postgresql://somewhere/secret"}')

    stored = noetl(
        "credential", "set", "pg", "--type", "postgres", "--data", f"@{secret}", url=stack.url
    )
    assert stored.returncode == 0, stored.stderr

    listed = noetl("credential", "list", "--json", url=stack.url).stdout
    assert [(item["name"], item["type"]) for item in json.loads(listed)] == [("pg", "postgres")]
    assert "secret" not in listed

    assert noetl("credential", "delete", "pg", url=stack.url).returncode == 0
    assert json.loads(noetl("credential", "list", "--json", url=stack.url).stdout) == []


def test_credential_data_that_is_no_json_object_is_refused_and_not_repeated() -> None:
    answer = noetl("credential", "set", "pg", "--type", "postgres", "--data", "hunter2")

    assert answer.returncode == 2
    assert "--data" in answer.stderr
    assert "hunter2" not in answer.stderr


def test_db_migrate_finds_nothing_to_do_in_a_running_system(stack: DevStack) -> None:
    answer = noetl("db", "migrate", "--dsn", stack.info()["dsn"])

    assert answer.stdout == "nothing to do: the schema is up to date\n"


def test_db_status_lists_what_is_applied_and_what_is_open(stack: DevStack, tmp_path: Path) -> None:
    dsn = stack.info()["dsn"]
    (tmp_path / "9999_later.sql").write_text("SELECT 1;")

    applied = json.loads(noetl("db", "status", "--dsn", dsn, "--json").stdout)
    shown = noetl("db", "status", "--dsn", dsn, "--directory", tmp_path).stdout.splitlines()

    assert {one["standing"] for one in applied} == {"applied"}
    assert shown[-2].split() == ["9999_later.sql", "open"]
    assert shown[-1] == f"{len(applied)} newer, 1 open"


def test_db_migrate_says_what_it_does_and_what_failed(stack: DevStack, tmp_path: Path) -> None:
    sql = "CREATE TABLE noetl.half (); ALTER TABLE noetl.nothing ADD COLUMN a int;"
    (tmp_path / "9999_later.sql").write_text(sql)

    dsn = stack.info()["dsn"]
    answer = noetl("db", "migrate", "--dsn", dsn, "--directory", tmp_path)

    assert answer.returncode == 1
    assert answer.stdout == ""
    assert "9999_later.sql: statement 1 of 2: CREATE TABLE noetl.half ()" in answer.stderr
    assert "statement 2 of 2 (line 1) failed" in answer.stderr
    assert "Nothing of this file was kept" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_db_dump_writes_the_schema_of_all_migrations_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "schema.sql"

    assert noetl("db", "dump", "--output", file).returncode == 0

    assert file.read_text() == (Path(__file__).parents[2] / "schema" / "schema.sql").read_text()


def test_version_and_help_answer_without_loading_the_system() -> None:
    assert noetl("version").stdout.startswith("noetl ")
    assert f"\n  {'bench':<10}" in noetl("--help").stdout

    probe = "import sys; sys.argv[1:] = ['--help']; from noetl_cli.main import app; app()"
    loaded = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", probe],
        capture_output=True,
        text=True,
        check=True,
    )
    for slow in ("httpx", "asyncpg", "rich", "msgspec", "noetl_core", "asyncio"):
        assert f" {slow}\n" not in loaded.stderr
