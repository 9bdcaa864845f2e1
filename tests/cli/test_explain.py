"""explain, workers, dead-letters: a person asks why nothing happens."""

import asyncio
import json
from pathlib import Path
from typing import Any

import asyncpg
import httpx

from cli.stacks import DevStack, eventually, noetl

ALONE = """\
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: alone, path: tests/alone}
workflow:
  - step: train
    spec: {pool: gpu}
    tool: {kind: noop}
"""


def ask(stack: DevStack, *arguments: str) -> str:
    answer = noetl(*arguments, NOETL_URL=stack.url)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def fetch(stack: DevStack, statement: str, *values: Any) -> Any:
    async def run() -> Any:
        conn = await asyncpg.connect(stack.info()["dsn"])
        try:
            return await conn.fetchval(statement, *values)
        finally:
            await conn.close()

    return asyncio.run(run())


def test_explain_says_that_nobody_serves_the_pool(stack: DevStack, tmp_path: Path) -> None:
    file = tmp_path / "alone.yaml"
    file.write_text(ALONE)
    ask(stack, "register", str(file))
    accepted = httpx.post(
        f"{stack.url}/api/execute", json={"path": "tests/alone"}, timeout=60
    ).json()
    execution_id = accepted["execution_id"]

    def told() -> str | None:
        text = ask(stack, "explain", execution_id)
        return text if "none is online" in text else None

    text = eventually(told, seconds=60)

    assert "waits for a worker of pool `gpu`, and none is online" in text
    assert "start a worker with NOETL_WORKER_POOL=gpu" in text
    ask(stack, "cancel", execution_id)


def test_workers_are_listed_with_what_is_free(stack: DevStack) -> None:
    def reported() -> list[dict[str, Any]]:
        workers = json.loads(ask(stack, "workers", "--json"))
        return [worker for worker in workers if worker["free"] is not None]

    (worker, *_) = eventually(reported, seconds=60)

    assert worker["free"] <= worker["slots"]
    assert worker["tools"]["python"]["slots"] > 0
    assert worker["name"] in ask(stack, "workers")


def test_a_dead_letter_is_listed_shown_and_discarded(stack: DevStack) -> None:
    letter = fetch(
        stack,
        "INSERT INTO noetl.dead_letter (shard_id, source, body, reason)"
        " VALUES (0, 'broker', '\\xff', 'nobody can read it') RETURNING dead_letter_id",
    )

    listed = ask(stack, "dead-letters", "list", "--source", "broker")
    shown = ask(stack, "dead-letters", "show", str(letter))
    refused = noetl("dead-letters", "retry", str(letter), NOETL_URL=stack.url)
    ask(stack, "dead-letters", "discard", str(letter))

    assert "nobody can read it" in listed
    assert f"noetl dead-letters discard {letter}" in shown
    assert refused.returncode == 2
    assert "or discard it" in refused.stderr
    assert fetch(stack, "SELECT count(*) FROM noetl.dead_letter") == 0
