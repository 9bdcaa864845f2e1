"""A schema that changes under the gateway is nothing that a client hears of."""

import asyncpg
import pytest

from services.api_gateway.conftest import Client

PLAYBOOK = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {{name: hello, path: tests/hello}}
workflow:
  - step: greet
    tool: {{kind: noop}}
    desc: "{}"
"""
CREDENTIAL = {"name": "pg", "type": "postgres", "data": {"dsn": "postgresql://x"}}


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE noetl.catalog ALTER COLUMN version TYPE bigint",
        "ALTER TABLE noetl.credential ALTER COLUMN type TYPE varchar",
        "ALTER TABLE noetl.execution ALTER COLUMN path TYPE varchar, ADD COLUMN extra text",
    ],
)
async def test_other_types_of_columns_are_answered_as_before(
    client: Client, database: str, change: str
) -> None:
    conn = await asyncpg.connect(database)
    first = [await status_of_everything(client, number) for number in range(3)]
    await conn.execute(change)
    await conn.close()

    then = await status_of_everything(client, 3)

    assert then == first[-1]
    assert all(status < 300 for status in then)


async def status_of_everything(client: Client, number: int) -> list[int]:
    """In transactions and outside; several at once, so that several connections know the plans."""
    content = PLAYBOOK.format(number)
    answers = [await client.post("/api/catalog/register", json={"content": content})]
    answers.append(await client.put("/api/credentials", json=CREDENTIAL))
    answers.append(await client.get("/api/credentials"))
    answers.append(await client.post("/api/execute", json={"path": "tests/hello"}))
    answers.append(await client.get(f"/api/executions/{answers[-1].json()['execution_id']}"))
    answers.append(await client.get("/api/executions"))
    answers.append(await client.delete("/api/credentials/pg"))
    return [answer.status_code for answer in answers]
