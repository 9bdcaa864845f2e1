"""Migrations that can be applied while everything runs: what squawk knows, and what it does not.

What the first release has is not judged: nobody ran anything when it was made. A finding that is
meant, such as dropping a column that no code has used since the last release, is acknowledged in
the file: a line that says why, and `-- squawk-ignore ban-drop-column` right above the statement.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from noetl_core.store.migration_file import (
    NO_TRANSACTION,
    Migration,
    migrations_directory,
    read_migration,
)

FIRST_RELEASE = "0009"
"""The last number of it."""

SQUAWK = Path(sys.executable).with_name("squawk")
OLDEST_POSTGRES = "15.0"
OURS_TO_DO = ("prefer-robust-stmts", "require-lock-timeout", "require-statement-timeout")
"""The migrator applies a file as a whole, and keeps nobody waiting for its locks."""

HOT = (
    r"noetl\.(?P<table>event|command|execution|result_ref|inbox|execution_shard"
    r"|projection_checkpoint)\b"
)
ALTER = rf"ALTER\s+TABLE\s+(ONLY\s+)?{HOT}"
OWN_RULES = {
    rf"(UPDATE|DELETE\s+FROM)\s+(ONLY\s+)?{HOT}": "fill it in by a service, in batches",
    rf"{ALTER}.*\bSET\s+NOT\s+NULL": "use CHECK ... NOT VALID, then VALIDATE",
    rf"{ALTER}.*\bADD\s+COLUMN.*\bCHECK\b": "add the CHECK by itself, NOT VALID",
    r"CREATE\b.*\bTRIGGER\b.*\bnoetl\.event\b": "the log has no triggers",
    r"(VACUUM\b.*\bFULL\b|CLUSTER\b)": "it locks the table while it copies it",
    r"LOCK\s+(TABLE\s+)?noetl\.": "the migrator sees to the locks",
    r"(BEGIN|COMMIT|ROLLBACK|START\s+TRANSACTION)\b": "the migrator sees to the transactions",
    rf"TRUNCATE\b.*{HOT}": "it empties the table under everybody",
}


def findings(file: Path) -> set[str]:
    migration = read_migration(file)
    return squawks(file, migration) | own_findings(migration)


def squawks(file: Path, migration: Migration) -> set[str]:
    options = ["--pg-version", OLDEST_POSTGRES, "--reporter", "json"]
    options += ["--exclude", ",".join(OURS_TO_DO)]
    options += ["--assume-in-transaction"] if migration.is_transaction else []
    told = subprocess.run(
        [str(SQUAWK), *options, str(file)], capture_output=True, text=True, check=False, timeout=60
    )
    assert told.returncode in (0, 1), told.stderr
    return {f"line {one['line'] + 1}: {one['rule_name']}" for one in json.loads(told.stdout)}


def own_findings(migration: Migration) -> set[str]:
    found = {
        f"line {statement.line}: {why}"
        for statement in migration.statements
        for pattern, why in OWN_RULES.items()
        if re.match(pattern, statement.text, re.IGNORECASE | re.DOTALL)
    }
    if migration.is_transaction and len(hot_tables_of(migration)) > 1:
        found.add("one hot table a file: its lock is held while the next one is waited for")
    return found


def hot_tables_of(migration: Migration) -> set[str]:
    matches = [re.match(ALTER, one.text, re.IGNORECASE) for one in migration.statements]
    return {match["table"].lower() for match in matches if match is not None}


def test_migrations_can_be_applied_while_everything_runs() -> None:
    files = sorted(migrations_directory().glob("*.sql"))
    later = [file for file in files if file.name[:4] > FIRST_RELEASE]

    assert {file.name: findings(file) for file in later if findings(file)} == {}


def test_no_two_migrations_have_the_same_number() -> None:
    names = sorted(file.name for file in migrations_directory().glob("*.sql"))

    assert all(re.fullmatch(r"[0-9]{4}_[a-z0-9_]+\.sql", name) for name in names), names
    assert len({name[:4] for name in names}) == len(names)


CONSTRAINT = "ALTER TABLE noetl.event ADD CONSTRAINT c CHECK (attempt > 0) NOT VALID;"
VALIDATED = f"{CONSTRAINT}\nALTER TABLE noetl.event VALIDATE CONSTRAINT c;"

STOPS_EVERYBODY = (
    "ALTER TABLE noetl.event ADD COLUMN a uuid DEFAULT gen_random_uuid();",
    "ALTER TABLE noetl.event ADD COLUMN a text CHECK (a <> '');",
    "ALTER TABLE noetl.event ALTER COLUMN iter_index TYPE bigint;",
    "ALTER TABLE noetl.event ADD CONSTRAINT c CHECK (attempt > 0);",
    VALIDATED,
    "ALTER TABLE noetl.command ALTER COLUMN meta SET NOT NULL;",
    "ALTER TABLE noetl.command DROP COLUMN meta;",
    "ALTER TABLE noetl.command RENAME COLUMN step TO name;",
    "CREATE INDEX a ON noetl.command (step);",
    "DROP INDEX noetl.event_loop_idx;",
    "UPDATE noetl.command SET priority = 1;",
    "DELETE FROM noetl.event;",
    "TRUNCATE noetl.inbox;",
    "CREATE TRIGGER t AFTER INSERT ON noetl.event FOR EACH ROW EXECUTE FUNCTION f();",
    "VACUUM FULL noetl.command;",
    "LOCK TABLE noetl.command;",
    "COMMIT;",
    "DROP FUNCTION noetl.commit_batch;",
    "ALTER TABLE noetl.event ADD COLUMN a text; ALTER TABLE noetl.command ADD COLUMN a text;",
)

NEW_TABLE = """
CREATE TABLE noetl.a (id bigint PRIMARY KEY, name text);
CREATE INDEX a_idx ON noetl.a (name);
GRANT SELECT ON noetl.a TO noetl_broker;
"""
MEANT = """
-- No code has used it since 0.2.
-- squawk-ignore ban-drop-column
ALTER TABLE noetl.command DROP COLUMN meta;
"""
DISTURBS_NOBODY = (
    "ALTER TABLE noetl.event ADD COLUMN a text;",
    "ALTER TABLE noetl.event ADD COLUMN a text DEFAULT 'constant';",
    CONSTRAINT,
    f"{NO_TRANSACTION}\n{VALIDATED}",
    f"{NO_TRANSACTION}\nCREATE INDEX CONCURRENTLY a ON noetl.event (node_name);",
    f"{NO_TRANSACTION}\nDROP INDEX CONCURRENTLY IF EXISTS noetl.a;",
    "CREATE OR REPLACE FUNCTION noetl.f() RETURNS void LANGUAGE sql AS 'SELECT';",
    NEW_TABLE,
    MEANT,
)


@pytest.mark.parametrize("sql", STOPS_EVERYBODY)
def test_what_would_stop_everybody_is_found(sql: str, tmp_path: Path) -> None:
    file = tmp_path / "0010_sample.sql"
    file.write_text(sql)

    assert findings(file)


@pytest.mark.parametrize("sql", DISTURBS_NOBODY)
def test_what_disturbs_nobody_is_not_found(sql: str, tmp_path: Path) -> None:
    file = tmp_path / "0010_sample.sql"
    file.write_text(sql)

    assert findings(file) == set()
