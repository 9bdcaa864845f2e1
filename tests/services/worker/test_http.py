"""Requests from playbooks to a real server."""

import asyncio
import base64
import email.utils
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from noetl_worker.tools.http import HttpTool, retry_after_seconds
from services.worker import calls


class Server:
    """Answers with what it was told to, and echoes the request if it was told nothing."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.status = 200
        self.headers: dict[str, str] = {"Content-Type": "application/json"}
        self.body: bytes | None = None
        self.delay = 0.0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (li.partition(": ") for li in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, target, _ = first.split(" ")
        request = {"method": method, "target": target, "headers": headers, "body": body.decode()}
        self.requests.append(request)
        await asyncio.sleep(self.delay)
        answer = json.dumps(request).encode() if self.body is None else self.body
        extra = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        writer.write(
            f"HTTP/1.1 {self.status} X\r\n{extra}Content-Length: {len(answer)}\r\n"
            "Connection: close\r\n\r\n".encode()
            + answer
        )
        await writer.drain()
        writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    listener = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with listener:
        yield made


@pytest.fixture
async def tool() -> AsyncIterator[HttpTool]:
    opened = HttpTool()
    yield opened
    await opened.close()


async def test_an_answer_has_its_parts(tool: HttpTool, server: Server) -> None:
    server.body = b'{"a": 1}'

    found = await calls.data(tool, config={"url": f"{server.url}/x"})

    assert found["status_code"] == 200
    assert found["data"] == {"a": 1}
    assert found["headers"]["content-type"] == "application/json"
    assert found["url"] == f"{server.url}/x"
    assert found["elapsed"] > 0


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"method": "GET", "body": ""}),
        ({"method": "post", "json": {"a": 1}}, {"method": "POST", "body": '{"a":1}'}),
        ({"method": "PUT", "payload": [1]}, {"method": "PUT", "body": "[1]"}),
        ({"method": "POST", "body": "raw"}, {"body": "raw"}),
        ({"method": "POST", "data": {"a": 1}}, {"body": '{"a":1}'}),
        ({"method": "POST", "form": {"a": 1, "b": ["x", "y"]}}, {"body": "a=1&b=x&b=y"}),
        (
            {
                "method": "POST",
                "data": {"a": "b c"},
                "headers": {"Content-Type": "application/x-www-form-urlencoded"},
            },
            {"body": "a=b+c"},
        ),
        (
            {"params": {"page": 2, "flag": True, "none": None, "ids": [1, 2]}},
            {"target": "/?page=2&flag=true&ids=1&ids=2"},
        ),
    ],
)
async def test_a_request_is_what_the_playbook_says(
    tool: HttpTool, server: Server, config: dict[str, Any], expected: dict[str, Any]
) -> None:
    await calls.data(tool, config={"endpoint": f"{server.url}/", **config})

    (request,) = server.requests
    assert {name: request[name] for name in expected} == expected


async def test_json_says_that_it_is_json(tool: HttpTool, server: Server) -> None:
    await calls.data(tool, config={"url": server.url, "method": "POST", "json": {}})

    assert server.requests[0]["headers"]["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("credential", "header", "value"),
    [
        ({"token": "t0k"}, "authorization", "Bearer t0k"),
        (
            {"username": "u", "password": "p"},
            "authorization",
            "Basic " + base64.b64encode(b"u:p").decode(),
        ),
        ({"header": "X-Api-Key", "value": "k"}, "x-api-key", "k"),
        ({"headers": {"X-A": "1"}}, "x-a", "1"),
    ],
)
async def test_a_credential_is_sent_in_its_own_way(
    tool: HttpTool, server: Server, credential: dict[str, Any], header: str, value: str
) -> None:
    await calls.data(
        tool, config={"url": server.url, "auth": "api"}, credentials={"api": credential}
    )

    assert server.requests[0]["headers"][header] == value


async def test_a_secret_in_the_query_is_not_in_the_result(tool: HttpTool, server: Server) -> None:
    server.body = b"1"
    server.status = 500

    result = await calls.run(
        tool,
        config={"url": server.url, "auth": "api"},
        credentials={"api": {"param": "key", "value": "hunter2"}},
    )

    assert "hunter2" in server.requests[0]["target"]
    assert "hunter2" not in str(result)


@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [
        (400, "client_error", False),
        (401, "auth", False),
        (403, "auth", False),
        (404, "not_found", False),
        (408, "timeout", True),
        (429, "rate_limit", True),
        (500, "server_error", True),
        (501, "server_error", False),
        (503, "server_error", True),
    ],
)
async def test_whatever_is_not_2xx_is_an_error_of_its_kind(
    tool: HttpTool, server: Server, status: int, kind: str, retryable: bool
) -> None:
    server.status = status
    server.body = b'{"reason": "because"}'

    result = await calls.run(tool, config={"url": server.url})

    assert result.error is not None
    assert (result.error.kind, result.error.retryable) == (kind, retryable)
    assert result.error.details["http"]["status"] == status
    assert result.data["data"] == {"reason": "because"}


async def test_retry_after_is_read(tool: HttpTool, server: Server) -> None:
    server.status = 429
    server.headers["Retry-After"] = "7"

    failed = await calls.error(tool, config={"url": server.url})

    assert failed.details["retry_after"] == 7.0
    moment = email.utils.formatdate(time.time() + 60, usegmt=True)
    assert 50 < (retry_after_seconds(moment) or 0) <= 60
    assert retry_after_seconds("soon") is None


async def test_text_and_bytes_are_no_json(tool: HttpTool, server: Server) -> None:
    server.headers = {"Content-Type": "text/plain; charset=latin-1"}
    server.body = "é".encode("latin-1")
    text = await calls.data(tool, config={"url": server.url})
    server.headers = {"Content-Type": "image/png"}
    server.body = b"\x89\xff"
    image = await calls.data(tool, config={"url": server.url})

    assert text["data"] == "é"
    assert (image["data"], image["encoding"]) == ("if8=", "base64")


async def test_wrong_json_is_a_parse_error(tool: HttpTool, server: Server) -> None:
    server.body = b"{oh no"

    result = await calls.run(tool, config={"url": server.url})

    assert result.error is not None
    assert result.error.kind == "parse"
    assert result.data["data"] == "{oh no"


async def test_a_redirect_is_followed_unless_the_playbook_says_otherwise(
    tool: HttpTool, server: Server
) -> None:
    server.status = 302
    server.headers = {"Location": f"{server.url}/there"}

    result = await calls.run(tool, config={"url": server.url, "follow_redirects": False})

    assert result.data["status_code"] == 302
    assert len(server.requests) == 1


async def test_no_connection_and_no_answer_are_told_apart(tool: HttpTool, server: Server) -> None:
    server.delay = 5.0

    away = await calls.error(tool, config={"url": "http://127.0.0.1:1/"})
    late = await calls.error(tool, config={"url": server.url}, timeout_s=0.2)
    wrong = await calls.error(tool, config={"url": "ftp://x/"})
    none = await calls.error(tool, config={"url": ""})

    assert (away.kind, away.retryable) == ("connection", True)
    assert (late.kind, late.retryable) == ("timeout", True)
    assert wrong.kind == "client_error"
    assert "`url`" in none.message


async def test_a_request_does_not_search_the_disk_for_modules(
    tool: HttpTool, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[str] = []

    class Finder:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            searched.append(name)

    await calls.data(tool, config={"url": server.url})
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])

    await calls.data(tool, config={"url": server.url})

    assert searched == []
