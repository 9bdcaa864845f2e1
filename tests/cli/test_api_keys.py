"""`noetl api-key`: made, shown once, listed without what is secret, revoked."""

import json

from cli.stacks import noetl, noetl_process
from noetl_core.store import api_key
from noetl_core.store.postgres import Pool


async def test_a_key_is_shown_once_and_counts_until_it_is_revoked(
    pool: Pool, database: str
) -> None:
    made = noetl_process("api-key", "create", "ann", "--role", "operator", "--dsn", database)
    key = made.stdout.strip()
    assert made.returncode == 0, made.stderr
    found = await api_key.find(pool, api_key.digest_of(key))
    assert found is not None
    assert (found.name, found.role) == ("ann", "operator")

    listed = noetl_process("api-key", "list", "--json", "--dsn", database).stdout
    assert [one["state"] for one in json.loads(listed)] == ["valid"]
    assert key not in listed
    row = await pool.fetchval("SELECT k::text FROM noetl.api_key AS k")
    assert key not in row

    assert noetl_process("api-key", "revoke", "ann", "--dsn", database).returncode == 0
    assert await api_key.find(pool, api_key.digest_of(key)) is None
    actions = await pool.fetch("SELECT action FROM noetl.audit ORDER BY audit_id")
    assert [row[0] for row in actions] == ["api_key.created", "api_key.revoked"]


def test_a_name_is_given_once_and_again_when_its_key_is_revoked(database: str) -> None:
    def run(*arguments: str) -> int:
        return int(noetl("api-key", *arguments, "--dsn", database).returncode)

    create = ("create", "bob", "--role", "reader", "--days", "7")
    assert [run(*create), run(*create), run("revoke", "bob"), run(*create)] == [0, 2, 0, 0]
    assert run("revoke", "nobody") == 2
    assert run("create", "eve", "--role", "king") == 2
