"""Credentials go in over HTTP and never come out."""

from dataclasses import replace
from typing import Any

import httpx

from noetl_api_gateway.app import build_app
from noetl_api_gateway.endpoint import Gateway
from noetl_core.process.secrets import Keyring
from noetl_core.store import credential
from noetl_core.store.postgres import Pool
from services.api_gateway.conftest import ENCRYPTION_KEY, Client

SECRET = "correct horse battery staple"
PG = {"name": "pg", "type": "postgres", "data": {"dsn": SECRET}}


async def test_a_credential_is_stored_so_that_a_worker_can_read_it(
    client: Client, pool: Pool
) -> None:
    for method in ("PUT", "POST"):
        answer = await client.request(method, "/api/credentials", json=PG)
        assert answer.status_code == 200

    row = await credential.load(pool, "pg")
    assert row is not None
    assert Keyring([ENCRYPTION_KEY]).decrypt("pg", row.sealed) == {"dsn": SECRET}
    assert SECRET.encode() not in row.sealed.ciphertext


async def test_no_answer_holds_the_data(client: Client) -> None:
    answers = [
        await client.put("/api/credentials", json=PG),
        await client.get("/api/credentials"),
        await client.request("DELETE", "/api/credentials/pg"),
    ]

    assert all(SECRET not in answer.text for answer in answers)
    (item,) = answers[1].json()["items"]
    assert item.keys() == {"name", "type", "created_at", "updated_at"}


async def test_every_change_is_audited_without_the_data(client: Client, pool: Pool) -> None:
    await client.put("/api/credentials", json=PG)
    await client.put("/api/credentials", json={**PG, "type": "other"})
    await client.delete("/api/credentials/pg")

    rows = await pool.fetch("SELECT action, subject, details FROM noetl.audit ORDER BY audit_id")

    assert [(row["action"], row["subject"]) for row in rows] == [
        ("credential.put", "pg"),
        ("credential.put", "pg"),
        ("credential.delete", "pg"),
    ]
    assert SECRET not in str(rows)


async def test_a_deleted_credential_is_gone(client: Client) -> None:
    await client.put("/api/credentials", json=PG)

    assert (await client.delete("/api/credentials/pg")).status_code == 204
    assert (await client.delete("/api/credentials/pg")).status_code == 404
    assert (await client.get("/api/credentials")).json()["items"] == []


async def test_a_wrong_credential_is_refused(client: Client) -> None:
    changes: list[dict[str, Any]] = [
        {"name": "../x"},
        {"name": ""},
        {"data": {}},
        {"data": "x"},
        {"more": 1},
    ]
    for wrong in changes:
        answer = await client.put("/api/credentials", json={**PG, **wrong})
        assert answer.status_code == 422
        assert SECRET not in answer.text


async def test_the_list_is_read_in_pages(client: Client) -> None:
    for name in ("c", "a", "b"):
        await client.put("/api/credentials", json={**PG, "name": name})

    first = (await client.get("/api/credentials?limit=2")).json()
    rest = (await client.get(f"/api/credentials?cursor={first['next_cursor']}")).json()

    assert [item["name"] for item in first["items"] + rest["items"]] == ["a", "b", "c"]


async def test_without_a_key_nothing_is_stored_in_the_clear(gateway: Gateway) -> None:
    app = build_app(replace(gateway, keyring=None))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://gateway"
    ) as client:
        answer = await client.put("/api/credentials", json=PG)

    # Nothing that another attempt would change.
    assert answer.status_code == 403
    assert "NOETL_ENCRYPTION_KEY" in answer.json()["detail"]
    assert "NOETL_ENCRYPTION_KEY" in answer.json()["detail"]
