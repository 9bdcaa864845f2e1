"""The gateway's HTTP API, as far as the command line uses it. Its words: noetl_core.wire.http.

A gateway that is away for a moment (killed, started again) is waited for: every call here can be
repeated without harm, because what must not happen twice carries an idempotency key.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import httpx
import msgspec

from noetl_cli.failure import EXIT_FAILED, EXIT_USAGE, CommandFailed
from noetl_core.domain.parse import format_problem
from noetl_core.wire import http

PATIENCE_SECONDS = 3.0
"""How long a gateway may be away before we give up on it."""

LONG_PATIENCE_SECONDS = 60.0
"""The same once an execution runs there: it goes on, whatever happens to the gateway."""

_RETRY_SECONDS = 0.2
_TIMEOUT_SECONDS = 30.0
_PAGE_SIZE = 1000

A = TypeVar("A")


@contextlib.asynccontextmanager
async def open_gateway(url: str) -> AsyncIterator["GatewayClient"]:
    # Not from the environment: a proxy for the outside world does not know our loopback.
    async with httpx.AsyncClient(
        base_url=url, timeout=_TIMEOUT_SECONDS, trust_env=False
    ) as connection:
        yield GatewayClient(connection, url)


class GatewayClient:
    def __init__(self, connection: httpx.AsyncClient, url: str) -> None:
        self.url = url
        self.patience_seconds = PATIENCE_SECONDS
        self._connection = connection

    async def register(self, content: str, *, file: str) -> http.Registered:
        body = http.RegisterRequest(content=content)
        return await self._ask("POST", "/api/catalog/register", http.Registered, body, file=file)

    async def execute(
        self, path: str, *, version: int | None, payload: dict[str, Any]
    ) -> http.ExecutionAccepted:
        body = http.ExecuteRequest(
            path=path, version=version, payload=payload, idempotency_key=str(uuid.uuid4())
        )
        return await self._ask("POST", "/api/execute", http.ExecutionAccepted, body)

    async def execution(self, execution_id: str, *, wait: float = 0.0) -> http.ExecutionView:
        path = f"/api/executions/{_part(execution_id)}?wait={wait:g}"
        return await self._ask("GET", path, http.ExecutionView)

    async def executions(self, *, limit: int) -> list[http.ExecutionView]:
        page = await self._ask("GET", f"/api/executions?limit={limit}", http.ExecutionPage)
        return page.items

    async def steps(self, execution_id: str) -> dict[str, http.StepView]:
        """Every step with its result, the value itself, however large."""
        path = f"/api/executions/{_part(execution_id)}/steps"
        steps = await self._ask("GET", path, dict[str, http.StepView])
        return {name: await self._complete(step) for name, step in steps.items()}

    async def events(self, execution_id: str) -> AsyncIterator[http.EventView]:
        path = f"/api/executions/{_part(execution_id)}/events?limit={_PAGE_SIZE}"
        after: str | None = "0"
        while after is not None:
            page = await self._ask("GET", f"{path}&after={after}", http.EventPage)
            for event in page.items:
                yield event
            after = page.next_after

    async def explain(self, execution_id: str) -> http.Explanation:
        path = f"/api/executions/{_part(execution_id)}/explain"
        return await self._ask("GET", path, http.Explanation)

    async def cancel(self, execution_id: str, *, reason: str) -> http.CancelAccepted:
        path = f"/api/executions/{_part(execution_id)}/cancel"
        return await self._ask("POST", path, http.CancelAccepted, http.CancelRequest(reason=reason))

    async def pause(self, execution_id: str, *, reason: str) -> http.ControlAccepted:
        path = f"/api/executions/{_part(execution_id)}/pause"
        return await self._ask("POST", path, http.ControlAccepted, http.PauseRequest(reason=reason))

    async def resume(self, execution_id: str) -> http.ControlAccepted:
        path = f"/api/executions/{_part(execution_id)}/resume"
        return await self._ask("POST", path, http.ControlAccepted)

    async def retry(
        self, execution_id: str, *, step: str | None, all_items: bool
    ) -> http.ControlAccepted:
        path = f"/api/executions/{_part(execution_id)}/retry"
        body = http.RetryRequest(step=step, items="all" if all_items else "failed")
        return await self._ask("POST", path, http.ControlAccepted, body)

    async def rerun(self, execution_id: str, *, payload: dict[str, Any]) -> http.ExecutionAccepted:
        path = f"/api/executions/{_part(execution_id)}/rerun"
        body = http.RerunRequest(payload=payload)
        return await self._ask("POST", path, http.ExecutionAccepted, body, is_once=True)

    async def fork(
        self, execution_id: str, *, step: str, payload: dict[str, Any]
    ) -> http.ExecutionAccepted:
        path = f"/api/executions/{_part(execution_id)}/fork"
        body = http.ForkRequest(step=step, payload=payload)
        return await self._ask("POST", path, http.ExecutionAccepted, body, is_once=True)

    async def signal(
        self, execution_id: str, *, name: str, data: Any, approved: bool, by: str
    ) -> http.ControlAccepted:
        path = f"/api/executions/{_part(execution_id)}/signal"
        body = http.SignalRequest(name=name, data=data, approved=approved, by=by)
        return await self._ask("POST", path, http.ControlAccepted, body, is_once=True)

    async def set_credential(self, name: str, *, kind: str, data: dict[str, Any]) -> None:
        body = http.CredentialRequest(name=name, type=kind, data=data)
        await self._exchange("POST", "/api/credentials", body)

    async def credentials(self) -> list[http.CredentialItem]:
        return (await self._ask("GET", "/api/credentials", http.CredentialPage)).items

    async def delete_credential(self, name: str) -> None:
        await self._exchange("DELETE", f"/api/credentials/{_part(name)}")

    async def dead_letters(
        self, execution: int | None, source: str | None, *, limit: int
    ) -> list[http.DeadLetterItem]:
        wanted = {"limit": limit, "execution_id": execution, "source": source}
        given = {name: value for name, value in wanted.items() if value is not None}
        path = f"/api/dead-letters?{urlencode(given)}"
        return (await self._ask("GET", path, http.DeadLetterPage)).items

    async def dead_letter(self, letter: str) -> http.DeadLetterDocument:
        path = f"/api/dead-letters/{_part(letter)}"
        return await self._ask("GET", path, http.DeadLetterDocument)

    async def retry_dead_letter(self, letter: str) -> http.DeadLetterRetried:
        path = f"/api/dead-letters/{_part(letter)}/retry"
        return await self._ask("POST", path, http.DeadLetterRetried)

    async def discard_dead_letter(self, letter: str) -> None:
        await self._exchange("DELETE", f"/api/dead-letters/{_part(letter)}")

    async def workers(self) -> list[http.WorkerView]:
        return (await self._ask("GET", "/api/workers", http.WorkerPage)).items

    async def shards(self) -> http.ShardsView:
        return await self._ask("GET", "/api/shards", http.ShardsView)

    async def resize_shards(self, *, shards_from: int, shards_to: int) -> http.ShardsView:
        body = http.ResizeRequest(shards_from=shards_from, shards_to=shards_to)
        return await self._ask("POST", "/api/shards/resize", http.ShardsView, body)

    async def _complete(self, step: http.StepView) -> http.StepView:
        """A result that was too large for the common answer is fetched on its own."""
        match step.result:
            case {"_truncated": True, "_ref": str(path)}:
                whole = await self._exchange("GET", quote(path, safe="/%"))
                return msgspec.structs.replace(step, result=msgspec.json.decode(whole))
            case _:
                return step

    async def _ask(
        self,
        method: str,
        path: str,
        kind: type[A],
        body: msgspec.Struct | None = None,
        *,
        file: str = "",
        is_once: bool = False,
    ) -> A:
        """`is_once`: however often it must be sent, it counts as one request."""
        answer = await self._exchange(method, path, body, file=file, is_once=is_once)
        return msgspec.json.decode(answer, type=kind)

    async def _exchange(
        self,
        method: str,
        path: str,
        body: msgspec.Struct | None = None,
        *,
        file: str = "",
        is_once: bool = False,
    ) -> bytes:
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if content is None else {"Content-Type": "application/json"}
        if is_once:
            headers[http.IDEMPOTENCY_HEADER] = str(uuid.uuid4())
        response = await self._send(method, path, content, headers)
        if not response.is_success:
            raise _failure(response, file)
        return response.content

    async def _send(
        self, method: str, path: str, content: bytes | None, headers: dict[str, str]
    ) -> httpx.Response:
        deadline = asyncio.get_running_loop().time() + self.patience_seconds
        while True:
            try:
                response = await self._connection.request(
                    method, path, content=content, headers=headers
                )
                if response.status_code != HTTPStatus.SERVICE_UNAVAILABLE:
                    return response
                trouble = _failure(response, "")
            except httpx.TransportError as error:
                trouble = CommandFailed(
                    f"cannot reach NoETL at {self.url} ({error or type(error).__name__}). "
                    "Start one with `noetl dev`, or set NOETL_URL to where it is."
                )
            if asyncio.get_running_loop().time() >= deadline:
                raise trouble
            await asyncio.sleep(_RETRY_SECONDS)


def _part(text: str) -> str:
    return quote(text, safe="")


def _failure(response: httpx.Response, file: str) -> CommandFailed:
    try:
        details = msgspec.json.decode(response.content, type=http.ProblemDetails)
    except msgspec.MsgspecError:
        return CommandFailed(f"the gateway answered {response.status_code}: {response.text[:200]}")
    if details.problems:
        message = "\n".join(format_problem(problem, file, "") for problem in details.problems)
        return CommandFailed(message, exit_code=EXIT_USAGE)
    field = f" ({details.field})" if details.field else ""
    is_ours = response.status_code < HTTPStatus.INTERNAL_SERVER_ERROR
    code = EXIT_USAGE if is_ours else EXIT_FAILED
    return CommandFailed(f"{details.detail or details.title}{field}", exit_code=code)
