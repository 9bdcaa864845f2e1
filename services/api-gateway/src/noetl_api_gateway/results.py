"""What steps returned: all of them in one bounded answer, or one of them whole."""

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from noetl_api_gateway import executions
from noetl_api_gateway.answers import answer
from noetl_api_gateway.endpoint import Endpoint, Gateway
from noetl_api_gateway.requests import execution_id_of, text_of
from noetl_core.blob import ReferenceNotAvailableError
from noetl_core.domain.envelope import Reference
from noetl_core.domain.errors import NotFoundError
from noetl_core.domain.ids import ExecutionId, LoopId, RefId, StepName
from noetl_core.domain.result_view import value_of
from noetl_core.domain.state import ExecutionState, StepState
from noetl_core.store import event_read, execution, manifest, result_ref
from noetl_core.store.event_read import Iteration
from noetl_core.wire import http
from noetl_core.wire.http import RESULTS_BYTES_MAX

JSON = "application/json"
LOOP_PAGE_SIZE = 500

_encode = msgspec.json.Encoder().encode
_decode_state = msgspec.json.Decoder(ExecutionState).decode


async def steps(gateway: Gateway, request: Request) -> Response:
    """Every step with its result in place, as far as they fit into one answer together."""
    execution_id = execution_id_of(request)
    found = await _steps(gateway, execution_id)
    results = await _Resolver(gateway, execution_id).resolve(found)
    views = {name: _view(step, results.get(name)) for name, step in found.items()}
    return answer(200, views)


async def result(gateway: Gateway, request: Request) -> Response:
    """The result of one step, however large; the list of a loop is sent while it is read."""
    execution_id = execution_id_of(request)
    name = text_of(request, "step")
    step = (await _steps(gateway, execution_id)).get(StepName(name))
    if step is None:
        raise NotFoundError(f"execution {execution_id} has not entered a step {name!r}")
    if step.result is None:
        raise NotFoundError(f"step {name!r} of execution {execution_id} has no result yet")
    reference = step.result.reference
    if reference is None:
        return Response(b"null", media_type=JSON)
    if reference.type == "eventlog":
        pages = _pages_of_loop(gateway, execution_id, LoopId(reference.ref_id))
        return StreamingResponse(_as_list(pages), media_type=JSON)
    return await _whole(gateway, execution_id, reference)


async def _steps(gateway: Gateway, execution_id: ExecutionId) -> dict[StepName, StepState]:
    """In the order of their results; those that have none yet come last."""
    row = await execution.read_state(gateway.pool, execution_id)
    if row is None:
        await executions.find(gateway.pool, execution_id)
        return {}
    found = _decode_state(row[1]).steps
    return dict(sorted(found.items(), key=lambda item: _recorded_as(item[1])))


def _recorded_as(step: StepState) -> int:
    reference = None if step.result is None else step.result.reference
    return http.ID_MAX if reference is None else reference.ref_id


async def _whole(gateway: Gateway, execution_id: ExecutionId, reference: Reference) -> Response:
    rows = await result_ref.find(gateway.pool, execution_id, [reference.ref_id])
    row = rows.get(reference.ref_id)
    if row is not None and row.inline is not None and row.media_type == JSON:
        return Response(row.inline, media_type=JSON)
    try:
        document = await gateway.results.get(gateway.pool, execution_id, reference)
    except ReferenceNotAvailableError as error:
        raise NotFoundError(str(error)) from error
    if isinstance(document, bytes):
        return Response(document, media_type=row.media_type if row else None)
    return Response(_encode(value_of(document)), media_type=JSON)


class _Resolver:
    """Puts results in the place of references until the answer is full."""

    def __init__(self, gateway: Gateway, execution_id: ExecutionId) -> None:
        self._gateway = gateway
        self._execution_id = execution_id
        self._bytes_left = RESULTS_BYTES_MAX

    async def resolve(self, steps: dict[StepName, StepState]) -> dict[StepName, Any]:
        results: dict[StepName, Any] = {}
        inline: dict[StepName, RefId] = {}
        for name, step in steps.items():
            reference = None if step.result is None else step.result.reference
            if reference is None:
                continue
            size = await self._size(reference)
            if size > self._bytes_left:
                results[name] = self._truncated(name, size)
                continue
            self._bytes_left -= size
            if reference.type == "db":
                inline[name] = reference.ref_id
            else:
                results[name] = await self._load(name, reference)
        return {**results, **await self._load_inline(inline)}

    async def _size(self, reference: Reference) -> int:
        if reference.type != "eventlog":
            return reference.bytes
        loop_id = LoopId(reference.ref_id)
        return await event_read.loop_bytes(self._gateway.pool, self._execution_id, loop_id)

    def _truncated(self, name: StepName, size: int) -> http.Truncated:
        path = f"/api/executions/{self._execution_id}/steps/{quote(name)}/result"
        return http.Truncated(ref=path, bytes=size)

    async def _load(self, name: StepName, reference: Reference) -> Any:
        try:
            document = await self._gateway.results.get(
                self._gateway.pool, self._execution_id, reference
            )
        except ReferenceNotAvailableError as error:
            return http.Unavailable(reason=error.reason)
        if isinstance(document, bytes):
            return self._truncated(name, len(document))
        return value_of(document)

    async def _load_inline(self, inline: dict[StepName, RefId]) -> dict[StepName, Any]:
        """All that is in the database, with one statement; plain JSON goes through as it is."""
        if not inline:
            return {}
        rows = await result_ref.find(self._gateway.pool, self._execution_id, list(inline.values()))
        results: dict[StepName, Any] = {}
        for name, ref_id in inline.items():
            row = rows.get(ref_id)
            if row is not None and row.inline is not None and row.media_type == JSON:
                results[name] = msgspec.Raw(row.inline)
            else:
                results[name] = await self._load(name, Reference(ref_id=ref_id, type="db"))
        return results


async def _pages_of_loop(
    gateway: Gateway, execution_id: ExecutionId, loop_id: LoopId
) -> AsyncIterator[list[bytes]]:
    """One value per item, as JSON and in order; null for an item that failed."""
    index = 0
    while page := await event_read.loop_page(
        gateway.pool, execution_id, loop_id, after_index=index - 1, limit=LOOP_PAGE_SIZE
    ):
        values: list[bytes] = []
        for iteration in page:
            values += [b"null"] * (iteration.iter_index - index)
            values.append(await _value(gateway, execution_id, iteration))
            index = iteration.iter_index + 1
        yield values
    total = await manifest.item_count(gateway.pool, execution_id, loop_id)
    if total is not None and total > index:
        yield [b"null"] * (total - index)


async def _value(gateway: Gateway, execution_id: ExecutionId, iteration: Iteration) -> bytes:
    if iteration.media_type is None:
        return b"null"
    if iteration.inline is not None and iteration.media_type == JSON:
        return iteration.inline
    reference = Reference(ref_id=RefId(iteration.event_id), type="object_store")
    document = await gateway.results.get(gateway.pool, execution_id, reference)
    return b"null" if isinstance(document, bytes) else _encode(value_of(document))


async def _as_list(pages: AsyncIterator[list[bytes]]) -> AsyncIterator[bytes]:
    opening = b"["
    async for values in pages:
        yield opening + b",".join(values)
        opening = b","
    yield b"[]" if opening == b"[" else b"]"


def _view(step: StepState, value: Any) -> http.StepView:
    error: Any = None if step.error is None else msgspec.to_builtins(step.error)
    return http.StepView(status=step.status, visit=step.visit, result=value, error=error)


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/api/executions/{execution_id}/steps",
        tag="executions",
        summary="Read every step with its result",
        handle=steps,
        answers={200: dict[str, http.StepView]},
        problems=(404,),
    ),
    Endpoint(
        method="GET",
        path="/api/executions/{execution_id}/steps/{step:path}/result",
        tag="executions",
        summary="Read the whole result of one step, as it was stored",
        handle=result,
        answers={200: Any},
        problems=(404,),
    ),
)
