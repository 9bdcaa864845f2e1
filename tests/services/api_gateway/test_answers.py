"""Every error is a problem with the right status, and nothing is told that should not be."""

from typing import Any

import pytest

from noetl_api_gateway.endpoint import Gateway
from noetl_core.store.postgres import Pool
from services.api_gateway.conftest import Client
from services.api_gateway.given import an_execution, registered

JSON = {"Content-Type": "application/json"}


def is_problem(answer: Any, status: int) -> bool:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["status"] == status
    assert body["type"].startswith("urn:noetl:problem:")
    assert body["title"]
    return bool(body["detail"])


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "JSON"),
        (b"{", 400, "JSON"),
        (b"\xff", 400, "JSON"),
        (b'{"path": "\xff"}', 400, "JSON"),
        (b'{"path": "\\ud800"}', 400, "JSON"),
        (b'{"path": "a", "payload": {"x":' + b"[" * 200_000, 400, "nested"),
        (b"[]", 422, "object"),
        (b"{}", 422, "path"),
        (b'{"path": 1}', 422, "`path`: expected `str`, got `int`"),
        (b'{"path": ""}', 422, "path"),
        (b'{"path": "a", "version": "1"}', 422, "`version`: expected `int | null`, got `str`"),
        (b'{"path": "a", "version": 0}', 422, "version"),
        (b'{"path": "a", "version": 99999999999999999999}', 422, "version"),
        (b'{"path": "a", "payload": []}', 422, "payload"),
        (b'{"path": "a", "colour": 1}', 422, "colour"),
        (b'{"path": "a\\u0000"}', 422, "U+0000"),
    ],
)
async def test_a_wrong_body_is_told_what_is_wrong(
    client: Client, body: bytes, status: int, words: str
) -> None:
    answer = await client.post("/api/execute", content=body, headers=JSON)

    assert is_problem(answer, status)
    assert words in answer.json()["detail"]


async def test_a_wrong_field_is_named(client: Client) -> None:
    wrong = await client.post("/api/execute", json={"path": 1})
    unknown = await client.post("/api/execute", json={"path": "a", "colour": 1})

    assert (wrong.json()["field"], unknown.json()["field"]) == ("path", "colour")


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded"])
async def test_a_body_that_a_form_could_send_is_415(client: Client, content_type: str) -> None:
    headers = {"Content-Type": content_type} if content_type else {}

    for path in ("/api/execute", "/api/catalog/register", "/api/credentials"):
        answer = await client.post(path, content=b'{"path": "a"}', headers=headers)
        assert is_problem(answer, 415)


async def test_a_body_that_is_too_large_is_413_whether_it_says_so_or_not(client: Client) -> None:
    async def chunks() -> Any:
        for _ in range(40):
            yield b" " * 100_000

    declared = await client.post("/api/execute", content=b" " * 4_000_000, headers=JSON)
    streamed = await client.post("/api/execute", content=chunks(), headers=JSON)

    assert is_problem(declared, 413)
    assert is_problem(streamed, 413)


async def test_an_unknown_path_is_404_and_a_wrong_method_405(client: Client) -> None:
    assert is_problem(await client.get("/api/nothing"), 404)
    assert is_problem(await client.get("/api/executions/"), 404)
    wrong = await client.delete("/api/executions")
    assert is_problem(wrong, 405)
    assert "GET" in wrong.headers["allow"]


async def test_a_database_that_is_away_is_503_with_retry_after(
    client: Client, gateway: Gateway
) -> None:
    assert (await client.get("/ready")).status_code == 200
    gateway.pool.terminate()

    for path in ("/ready", "/api/executions", "/api/executions/1", "/api/catalog"):
        answer = await client.get(path)
        assert is_problem(answer, 503)
        assert answer.headers["retry-after"] == "1"
    assert (await client.get("/health")).status_code == 200


async def test_a_bug_is_500_and_tells_nothing_of_itself(client: Client, pool: Pool) -> None:
    await registered(client)
    await pool.execute("DROP TABLE noetl.inbox")

    answer = await client.post("/api/execute", json={"path": "examples/hello"})

    assert is_problem(answer, 500)
    assert "inbox" not in answer.text


async def test_a_read_only_standby_is_503(client: Client, pool: Pool, gateway: Gateway) -> None:
    await registered(client)
    name = await pool.fetchval("SELECT current_database()")
    await pool.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    await gateway.pool.expire_connections()

    assert is_problem(await client.post("/api/execute", json={"path": "examples/hello"}), 503)


async def test_head_is_get_without_a_body(client: Client, pool: Pool) -> None:
    await an_execution(pool, 1)

    answer = await client.head("/api/executions/1")

    assert (answer.status_code, answer.content) == (200, b"")
