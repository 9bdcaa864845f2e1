"""What steps returned: all of them in one bounded answer, or one of them whole.

Lists that the log or a manifest puts together (loops, pages) are sent while they are read.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from noetl_api_gateway import executions
from noetl_api_gateway.answers import answer
from noetl_api_gateway.endpoint import Endpoint, Gateway
from noetl_api_gateway.requests import execution_id_of, query, text_of
from noetl_api_gateway.shown import until_shown
from noetl_core.blob import ReferenceNotAvailableError
from noetl_core.blob.documents import check_time, document_in
from noetl_core.domain.envelope import Reference
from noetl_core.domain.errors import NotFoundError
from noetl_core.domain.ids import ID_MAX, EventId, ExecutionId, LoopId, StepName
from noetl_core.domain.pages import PageRule, items_of
from noetl_core.domain.result_view import value_of
from noetl_core.domain.state import StepState
from noetl_core.store import execution, manifest
from noetl_core.store.loop_result import Ended
from noetl_core.store.result_ref import ResultKey, StoredRow
from noetl_core.wire import http
from noetl_core.wire.http import RESULTS_BYTES_MAX

JSON = "application/json"
LOOP_PAGE_SIZE = 500
RESOLVED_AT_ONCE = 16
"""How many items of a loop are in memory together that are more than a small document."""
CHUNK_BYTES = 256 * 1024

_encode = msgspec.json.Encoder().encode


async def steps(gateway: Gateway, request: Request) -> Response:
    """Every step with its result in place, as far as they fit into one answer together."""
    execution_id = await _shown(gateway, request)
    found = await _steps(gateway, execution_id)
    results = await _Resolver(gateway, execution_id).resolve(found)
    views = {name: _view(step, results.get(name)) for name, step in found.items()}
    return answer(200, views)


async def result(gateway: Gateway, request: Request) -> Response:
    """The result of one step, however large; a list is sent while it is read."""
    execution_id = await _shown(gateway, request)
    name = text_of(request, "step")
    step = (await _steps(gateway, execution_id)).get(StepName(name))
    if step is None:
        raise NotFoundError(f"execution {execution_id} has not entered a step {name!r}")
    if step.result is None:
        raise NotFoundError(f"step {name!r} of execution {execution_id} has no result yet")
    reference = step.result.reference
    if reference is None:
        return Response(b"null", media_type=JSON)
    try:
        return await _whole(gateway, reference.execution_id or execution_id, reference)
    except ReferenceNotAvailableError as error:
        raise NotFoundError(str(error)) from error


async def _shown(gateway: Gateway, request: Request) -> ExecutionId:
    """The execution that is asked for, when its steps can be read as the client knows them."""
    execution_id = execution_id_of(request)
    asked = query(request, http.StepsQuery)
    if asked.min_event_id:
        await executions.find(gateway.pool, execution_id)
        await until_shown(gateway, execution_id, asked.min_event_id, seconds=asked.wait)
    return execution_id


async def _steps(gateway: Gateway, execution_id: ExecutionId) -> dict[StepName, StepState]:
    """In the order of their results; those that have none yet come last."""
    state = await execution.read_state(gateway.pool, execution_id)
    if state is None:
        await executions.find(gateway.pool, execution_id)
        return {}
    return dict(sorted(state.steps.items(), key=lambda item: _recorded_as(item[1])))


def _recorded_as(step: StepState) -> int:
    reference = None if step.result is None else step.result.reference
    return ID_MAX if reference is None else reference.ref_id


async def _whole(gateway: Gateway, execution_id: ExecutionId, reference: Reference) -> Response:
    if reference.type == "eventlog":
        values = _values_of_loop(gateway, execution_id, LoopId(reference.ref_id))
        return await _sent_while_read(values)
    if reference.type == "pages":
        return await _whole_pages(gateway, execution_id, reference)
    rows = await gateway.results.history.find(gateway.pool, execution_id, [reference.ref_id])
    row = rows.get(reference.ref_id)
    if row is not None:
        check_time(execution_id, row)
    if row is not None and row.inline is not None and row.media_type == JSON:
        return Response(row.inline, media_type=JSON)
    document = await gateway.results.get(gateway.pool, execution_id, reference)
    if isinstance(document, bytes):
        return Response(document, media_type=row.media_type if row else None)
    return Response(_encode(value_of(document)), media_type=JSON)


async def _whole_pages(
    gateway: Gateway, execution_id: ExecutionId, reference: Reference
) -> Response:
    sequence = EventId(reference.ref_id)
    rule = await gateway.results.page_rule(gateway.pool, execution_id, sequence)
    if rule.collect == "replace":
        value = await gateway.results.pages(gateway.pool, execution_id, sequence)
        return Response(_as_json(value), media_type=JSON)
    return await _sent_while_read(_values_of_pages(gateway, execution_id, sequence, rule))


async def _sent_while_read(values: AsyncIterator[bytes]) -> Response:
    """The first piece is read before anything is said: what cannot be read then is an error with a
    status, and no answer that breaks off.
    """
    chunks = _as_list(values)
    first = await anext(chunks)

    async def all_chunks() -> AsyncIterator[bytes]:
        yield first
        async for chunk in chunks:
            yield chunk

    return StreamingResponse(all_chunks(), media_type=JSON)


class _Resolver:
    """Puts results in the place of references until the answer is full."""

    def __init__(self, gateway: Gateway, execution_id: ExecutionId) -> None:
        self._gateway = gateway
        self._execution_id = execution_id
        self._bytes_left = RESULTS_BYTES_MAX

    async def resolve(self, steps: dict[StepName, StepState]) -> dict[StepName, Any]:
        results: dict[StepName, Any] = {}
        inline: dict[StepName, ResultKey] = {}
        for name, step in steps.items():
            reference = None if step.result is None else step.result.reference
            if reference is None:
                continue
            owner = reference.execution_id or self._execution_id
            size = await _size(self._gateway, owner, reference, enough=self._bytes_left)
            if size > self._bytes_left:
                results[name] = self._truncated(name, size)
                continue
            self._bytes_left -= size
            if reference.type == "db":
                inline[name] = (owner, reference.ref_id)
            else:
                results[name] = await self._load(name, reference)
        return {**results, **await self._load_inline(inline)}

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

    async def _load_inline(self, inline: dict[StepName, ResultKey]) -> dict[StepName, Any]:
        """All that is in the database, with one statement; plain JSON goes through as it is."""
        if not inline:
            return {}
        history = self._gateway.results.history
        rows = await history.find_each(self._gateway.pool, list(inline.values()))
        results: dict[StepName, Any] = {}
        for name, key in inline.items():
            row = rows.get(key)
            if row is not None and _is_plain(row):
                results[name] = msgspec.Raw(row.inline or b"")
            else:
                reference = Reference(execution_id=key[0], ref_id=key[1], type="db")
                results[name] = await self._load(name, reference)
        return results


async def _size(
    gateway: Gateway, execution_id: ExecutionId, reference: Reference, *, enough: int
) -> int:
    """How much is behind a reference; beyond `enough` it is not weighed further."""
    if reference.type == "pages":
        return await manifest.pages_bytes(gateway.pool, execution_id, EventId(reference.ref_id))
    if reference.type != "eventlog":
        return reference.bytes
    loop = await manifest.activations(gateway.pool, execution_id, LoopId(reference.ref_id))
    history = gateway.results.history
    size, inner_loops = await history.weight(gateway.pool, execution_id, loop.loop_ids)
    for inner in inner_loops:
        if size > enough:
            break
        owner = inner.execution_id or execution_id
        size += await _size(gateway, owner, inner, enough=enough - size)
    return size


async def _values_of_loop(
    gateway: Gateway, execution_id: ExecutionId, loop_id: LoopId
) -> AsyncIterator[bytes]:
    """One value per item, as JSON and in order; null for an item that failed.

    Of a cursor, one per frame that has claimed rows.
    """
    loop = await manifest.activations(gateway.pool, execution_id, loop_id)
    history = gateway.results.history
    stop = await history.last_index(gateway.pool, execution_id, loop.loop_ids) + 1
    index = 0
    async for ended in history.pages_of_loop(
        gateway.pool, execution_id, loop.loop_ids, stop=stop, size=LOOP_PAGE_SIZE
    ):
        page = ended
        if loop.total is None:
            page = [item for item in ended if item.is_frame or not item.is_done]
        for first in range(0, len(page), RESOLVED_AT_ONCE):
            group = page[first : first + RESOLVED_AT_ONCE]
            for item, value in zip(group, await _values(gateway, execution_id, group), strict=True):
                if loop.total is not None:
                    for _ in range(index, item.iter_index):
                        yield b"null"
                yield value
                index = item.iter_index + 1
    for _ in range(index, loop.total or 0):
        yield b"null"


async def _values(
    gateway: Gateway, execution_id: ExecutionId, items: Sequence[Ended]
) -> list[bytes]:
    references = {n: found for n, item in enumerate(items) if (found := item.elsewhere)}
    resolved: dict[int, Any] = {}
    if references:
        values = await gateway.results.values(gateway.pool, execution_id, list(references.values()))
        resolved = dict(zip(references, values, strict=True))
    return [
        _as_json(resolved[n]) if n in resolved else _at_hand(execution_id, item)
        for n, item in enumerate(items)
    ]


def _at_hand(execution_id: ExecutionId, item: Ended) -> bytes:
    row = item.row
    if row is None or row.inline is None:
        return b"null"
    if _is_plain(row):
        return row.inline
    return _as_json(value_of(document_in(execution_id, row, row.inline)))


def _is_plain(row: StoredRow) -> bool:
    """Its bytes can go out as they are."""
    return row.inline is not None and row.media_type == JSON and not row.is_expired


def _as_json(value: Any) -> bytes:
    """Within a list there is no place for bytes that are no JSON."""
    return b"null" if isinstance(value, bytes) else _encode(value)


async def _values_of_pages(
    gateway: Gateway, execution_id: ExecutionId, sequence: EventId, rule: PageRule
) -> AsyncIterator[bytes]:
    async for page in gateway.results.each_page(gateway.pool, execution_id, sequence):
        for item in items_of(rule, page):
            yield _as_json(item)


async def _as_list(values: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Small values go out together, a large one at once."""
    chunk = bytearray(b"[")
    separator = b""
    async for value in values:
        chunk += separator + value
        separator = b","
        if len(chunk) >= CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
    yield bytes(chunk + b"]")


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
        query=http.StepsQuery,
        answers={200: dict[str, http.StepView]},
        problems=(404, 422, 503, 504),
    ),
    Endpoint(
        method="GET",
        path="/api/executions/{execution_id}/steps/{step:path}/result",
        tag="executions",
        summary="Read the whole result of one step, as it was stored",
        handle=result,
        query=http.StepsQuery,
        answers={200: Any},
        problems=(404, 422, 503, 504),
    ),
)
