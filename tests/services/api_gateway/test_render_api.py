"""Templates over HTTP give what they give in a worker, and hurt nobody."""

import asyncio
from typing import Any

import pytest

from noetl_api_gateway import rendering
from services.api_gateway.conftest import Client


async def render(client: Client, template: Any, **context: Any) -> Any:
    answer = await client.post(
        "/api/context/render", json={"template": template, "context": context}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["value"]


async def test_a_template_gives_its_native_value(client: Client) -> None:
    assert await render(client, "{{ a + 1 }}", a=1) == 2
    assert await render(client, "a is {{ a }}", a=1) == "a is 1"
    assert await render(client, {"x": ["{{ a }}", 1]}, a={"b": None}) == {"x": [{"b": None}, 1]}


async def test_bare_names_are_looked_up_as_in_a_playbook(client: Client) -> None:
    value = await render(
        client,
        ["{{ a }}", "{{ b }}", "{{ workload.a }}", "{{ ctx.b }}", "{{ fetch.rows }}"],
        workload={"a": 1, "b": 2},
        ctx={"b": 3},
        fetch={"rows": [4]},
    )

    assert value == [1, 3, 1, 3, [4]]


async def test_an_unknown_name_is_422_and_says_where(client: Client) -> None:
    answer = await client.post(
        "/api/context/render",
        json={"template": {"url": "{{ workload.hots }}"}, "context": {"workload": {"host": 1}}},
    )

    assert answer.status_code == 422
    body = answer.json()
    assert body["field"] == "template.url"
    assert "workload.hots" in body["detail"]


async def test_a_template_cannot_reach_the_process(client: Client) -> None:
    for template in ("{{ ''.__class__.__mro__ }}", "{% include 'x' %}", "{{ a.__init__ }}"):
        answer = await client.post(
            "/api/context/render", json={"template": template, "context": {"a": {}}}
        )
        assert answer.status_code == 422


ENDLESS = "{% for i in range(90000) %}{% set x = 'a' * 9000000 %}{% endfor %}"


async def test_a_template_that_takes_too_long_is_stopped_and_others_are_answered(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await render(client, "{{ 1 }}") == 1
    patient = rendering.SECONDS_MAX
    monkeypatch.setattr(rendering, "SECONDS_MAX", 0.5)
    endless = asyncio.create_task(client.post("/api/context/render", json={"template": ENDLESS}))

    assert (await client.get("/health")).status_code == 200

    assert (await endless).status_code == 422
    monkeypatch.setattr(rendering, "SECONDS_MAX", patient)
    assert await render(client, "{{ 1 }}") == 1


async def test_a_request_that_was_given_up_does_not_answer_the_next(client: Client) -> None:
    assert await render(client, "{{ 1 }}") == 1
    given_up = asyncio.create_task(client.post("/api/context/render", json={"template": ENDLESS}))
    await asyncio.sleep(0.2)
    given_up.cancel()

    assert await render(client, "{{ 2 }}") == 2
