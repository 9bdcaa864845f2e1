"""Playbooks over HTTP."""

import asyncio

import msgspec
import pytest

from noetl_core.domain.errors import PlaybookInvalidError
from noetl_core.domain.parse import parse_playbook, warnings_of
from services.api_gateway.conftest import Client
from services.api_gateway.given import HELLO, registered


async def test_a_new_playbook_is_created_as_version_one(client: Client) -> None:
    answer = await client.post("/api/catalog/register", json={"content": HELLO})

    assert answer.status_code == 201
    body = answer.json()
    assert isinstance(body.pop("catalog_id"), str)
    assert body == {"path": "examples/hello", "version": 1, "created": True, "warnings": []}


async def test_a_playbook_may_be_sent_as_bare_yaml(client: Client) -> None:
    answer = await client.post(
        "/api/catalog/register", content=HELLO, headers={"Content-Type": "text/yaml"}
    )

    assert answer.status_code == 201
    assert answer.json()["path"] == "examples/hello"


async def test_registering_again_answers_200_and_the_same_version(client: Client) -> None:
    first = await registered(client)

    answer = await client.post("/api/catalog/register", json={"content": HELLO})

    assert answer.status_code == 200
    assert answer.json() == {**first, "created": False}


async def test_registrations_at_once_have_versions_of_their_own(client: Client) -> None:
    texts = [f"{HELLO}# {number}\n" for number in range(8)]

    bodies = await asyncio.gather(*(registered(client, text) for text in texts))

    assert sorted(body["version"] for body in bodies) == list(range(1, 9))


async def test_a_wrong_playbook_is_refused_with_line_and_column(client: Client) -> None:
    wrong = HELLO.replace("- step: greet", "- stepp: greet")

    answer = await client.post("/api/catalog/register", json={"content": wrong})

    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["type"] == "urn:noetl:problem:playbook-invalid"
    assert any(problem["line"] == 6 and problem["column"] > 0 for problem in body["problems"])


async def test_validating_says_what_is_wrong_and_stores_nothing(client: Client) -> None:
    wrong = HELLO.replace("workflow:", "workflows:")

    good = await client.post("/api/catalog/validate", json={"content": HELLO})
    bad = await client.post("/api/catalog/validate", json={"content": wrong})

    assert (good.status_code, bad.status_code) == (200, 200)
    assert good.json()["valid"]
    assert not bad.json()["valid"]
    assert bad.json()["problems"]
    assert (await client.get("/api/catalog")).json()["items"] == []


async def test_every_way_in_gives_the_same_problems_and_warnings(client: Client) -> None:
    doubtful = HELLO.replace("workflow:", "workflow:\n  - {step: nobody_comes}")
    wrong = HELLO.replace("workflow:", "workflow:\n  - {step: a, tol: 1}\n  - {step: 7}")
    warnings = msgspec.to_builtins(warnings_of(parse_playbook(doubtful)))
    with pytest.raises(PlaybookInvalidError) as refused:
        parse_playbook(wrong)
    problems = msgspec.to_builtins(refused.value.problems)

    kept = (await client.post("/api/catalog/register", json={"content": doubtful})).json()
    checked = (await client.post("/api/catalog/validate", json={"content": doubtful})).json()
    not_kept = (await client.post("/api/catalog/register", json={"content": wrong})).json()
    not_valid = (await client.post("/api/catalog/validate", json={"content": wrong})).json()

    assert warnings
    assert kept["warnings"] == checked["problems"] == list(warnings)
    assert checked["valid"]
    assert not_kept["problems"] == not_valid["problems"] == problems
    assert not not_valid["valid"]


async def test_a_playbook_is_read_by_path_and_version(client: Client) -> None:
    await registered(client)
    await registered(client, HELLO + "# changed\n")

    newest = (await client.get("/api/catalog/examples/hello")).json()
    first = (await client.get("/api/catalog/examples/hello?version=1")).json()

    assert (newest["version"], first["version"]) == (2, 1)
    assert first["content"] == HELLO
    assert len(first["sha256"]) == 64


async def test_a_playbook_that_is_not_there_is_404(client: Client) -> None:
    await registered(client)

    for path in ("nobody", "examples/hello?version=9", "%00"):
        assert (await client.get(f"/api/catalog/{path}")).status_code == 404


async def test_the_list_is_read_in_pages(client: Client) -> None:
    for name in "cab":
        await registered(client, HELLO.replace("examples/hello", name))

    first = (await client.get("/api/catalog?limit=2")).json()
    rest = (await client.get(f"/api/catalog?limit=2&cursor={first['next_cursor']}")).json()

    assert [item["path"] for item in first["items"] + rest["items"]] == ["a", "b", "c"]
    assert rest["next_cursor"] is None


async def test_a_playbook_that_is_too_large_is_413(client: Client) -> None:
    large = HELLO + "#" * (1024 * 1024)

    as_json = await client.post("/api/catalog/register", json={"content": large})
    as_yaml = await client.post(
        "/api/catalog/register", content=large, headers={"Content-Type": "text/yaml"}
    )

    assert (as_json.status_code, as_yaml.status_code) == (413, 413)
