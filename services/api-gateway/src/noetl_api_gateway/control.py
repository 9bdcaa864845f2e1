"""Control of executions from outside: signal, pause, resume, retry, rerun, fork; and children.

What the gateway knows of an execution may be a moment old. So it refuses what it can see to be
pointless, with a sentence, and the broker drops what has become so in the meantime.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from noetl_api_gateway.answers import answer
from noetl_api_gateway.endpoint import Endpoint, Gateway
from noetl_api_gateway.executions import begin, find, view_of
from noetl_api_gateway.origin import payload_of, state_at
from noetl_api_gateway.promises import (
    fingerprint,
    idempotency_key,
    promise,
    promise_once,
    stored,
)
from noetl_api_gateway.requests import (
    RequestError,
    execution_id_of,
    json_body,
    optional_json_body,
    query,
)
from noetl_core.domain.envelope import Envelope
from noetl_core.domain.errors import ConflictError
from noetl_core.domain.ids import CatalogId, EventId, ExecutionId, StepName, visit_id
from noetl_core.domain.state import TERMINAL, ExecutionState, ExecutionStatus
from noetl_core.store import event, execution
from noetl_core.store.execution import StateUnreadableError
from noetl_core.store.idempotency import Keyed
from noetl_core.wire import http
from noetl_core.wire.http import IDEMPOTENCY_HEADER
from noetl_core.wire.messages import Fork, Message, Pause, Resume, Retry, Signal, Start

STEPS_NAMED_MAX = 20


async def signal(gateway: Gateway, request: Request) -> Response:
    """Tell an execution something: what a step waits for, an approval or a denial."""
    execution_id = execution_id_of(request)
    asked = await json_body(request, http.SignalRequest)
    key = idempotency_key(request)
    await _open_view(gateway, execution_id)
    await _check_approver(gateway, execution_id, asked)
    message = Signal(
        execution_id=execution_id,
        signal_id=gateway.mint(),
        name=asked.name,
        approved=asked.approved,
        by=asked.by,
        data=None if asked.data is None else stored(asked.data, field="data"),
    )
    if key is None:
        return await _accept(gateway, message)
    wanted = Keyed(execution_id, fingerprint(["signal", execution_id, asked]))
    await promise_once(gateway, key, wanted, message)
    return answer(202, http.ControlAccepted(execution_id=str(execution_id)))


async def pause(gateway: Gateway, request: Request) -> Response:
    """No further command is begun; what runs comes to its end."""
    execution_id = execution_id_of(request)
    asked = await optional_json_body(request, http.PauseRequest)
    view = await _open_view(gateway, execution_id)
    if view.status == "PAUSED":
        raise ConflictError(f"execution {execution_id} is paused already")
    return await _accept(gateway, Pause(execution_id=execution_id, reason=asked.reason))


async def resume(gateway: Gateway, request: Request) -> Response:
    execution_id = execution_id_of(request)
    view = await _open_view(gateway, execution_id)
    if view.status != "PAUSED":
        raise ConflictError(
            f"execution {execution_id} is not paused, it is {view.status}; "
            "if it was paused a moment ago, try again"
        )
    return await _accept(gateway, Resume(execution_id=execution_id))


async def retry(gateway: Gateway, request: Request) -> Response:
    """Let an execution that has ended go on, from what failed or from a step."""
    execution_id = execution_id_of(request)
    asked = await optional_json_body(request, http.RetryRequest)
    view = await find(gateway.pool, execution_id)
    if view.status not in TERMINAL:
        raise ConflictError(
            f"execution {execution_id} is {view.status}: it can be retried when it has ended"
        )
    return await _accept(gateway, await retry_of(gateway, view, asked))


async def retry_of(gateway: Gateway, view: http.ExecutionView, asked: http.RetryRequest) -> Retry:
    """What lets an execution that has ended go on. Refuses what would lead to nothing."""
    execution_id = ExecutionId(int(view.execution_id))
    state = await execution.read_state(gateway.pool, execution_id)
    if state is None:
        raise ConflictError(f"execution {execution_id} was never begun: start it anew")
    await _check_not_archived(gateway, execution_id)
    _check_retry(state, view.status, asked.step)
    step = None if asked.step is None else StepName(asked.step)
    return Retry(execution_id=execution_id, step=step, items=asked.items)


async def rerun(gateway: Gateway, request: Request) -> Response:
    """Start the same version of the same playbook again, from its beginning."""
    execution_id = execution_id_of(request)
    asked = await optional_json_body(request, http.RerunRequest)
    key = idempotency_key(request)
    view = await find(gateway.pool, execution_id)
    origin = await _origin(gateway, execution_id)
    payload = await payload_of(gateway, execution_id, origin, over=asked.payload)
    start = msgspec.structs.replace(_same(gateway, view), payload=payload)
    wanted = fingerprint(["rerun", execution_id, asked])
    return await begin(gateway, start, key=key, wanted=wanted)


async def fork(gateway: Gateway, request: Request) -> Response:
    """Start a new execution at a step of another one, with what was true when that was entered."""
    execution_id = execution_id_of(request)
    asked = await json_body(request, http.ForkRequest)
    key = idempotency_key(request)
    step = StepName(asked.step)
    view = await find(gateway.pool, execution_id)
    await _check_not_archived(gateway, execution_id)
    origin = await _origin(gateway, execution_id)
    entries = await event.entries(gateway.pool, execution_id)
    if step not in entries:
        raise _never_entered(execution_id, step, list(entries))
    state = await state_at(gateway.pool, execution_id, entries[step])
    start = msgspec.structs.replace(
        _same(gateway, view),
        payload=await payload_of(gateway, execution_id, origin, over=asked.payload),
        fork=Fork(
            origin=execution_id,
            entry=step,
            ctx=state.ctx,
            steps=_inherited(state),
            input=state.visits[visit_id(step, state.steps[step].visit)].input,
        ),
    )
    wanted = fingerprint(["fork", execution_id, asked])
    return await begin(gateway, start, key=key, wanted=wanted)


async def children(gateway: Gateway, request: Request) -> Response:
    """The executions that steps of this one have started, in order."""
    execution_id = execution_id_of(request)
    asked = query(request, http.ChildrenQuery)
    rows = await execution.children(
        gateway.pool, execution_id, after=ExecutionId(asked.after), limit=asked.limit + 1
    )
    if not rows:
        await find(gateway.pool, execution_id)
    shown = rows[: asked.limit]
    page = http.ExecutionPage(
        items=[view_of(row) for row in shown],
        next_cursor=str(shown[-1]["execution_id"]) if len(rows) > asked.limit else None,
    )
    return answer(200, page)


async def _accept(gateway: Gateway, message: Signal | Pause | Resume | Retry) -> Response:
    messages: list[Message] = [message]
    await promise(gateway, message.execution_id, messages)
    return answer(202, http.ControlAccepted(execution_id=str(message.execution_id)))


async def _open_view(gateway: Gateway, execution_id: ExecutionId) -> http.ExecutionView:
    view = await find(gateway.pool, execution_id)
    if view.status in TERMINAL:
        raise ConflictError(f"execution {execution_id} has ended already: {view.status}")
    return view


async def _check_approver(
    gateway: Gateway, execution_id: ExecutionId, asked: http.SignalRequest
) -> None:
    """Whoever may not approve is told now: the broker would let the step wait on in silence."""
    try:
        state = await execution.read_state(gateway.pool, execution_id)
    except StateUnreadableError:
        return  # the broker reads the log instead, and knows
    waits = [c.parked for c in state.commands.values() if c.parked] if state else []
    called = [wait for wait in waits if wait.signal == asked.name]
    if called and all(wait.approvers and asked.by not in wait.approvers for wait in called):
        who = " or ".join(sorted({name for wait in called for name in wait.approvers}))
        raise RequestError(422, f"only {who} may give the signal `{asked.name}`", field="by")


def _check_retry(state: ExecutionState, status: ExecutionStatus, step: str | None) -> None:
    execution_id = state.execution_id
    if step is not None:
        if step not in state.steps:
            raise _never_entered(execution_id, step, list(state.steps))
    elif status == "COMPLETED":
        detail = f"execution {execution_id} has completed: name the step to run again from"
        raise RequestError(422, detail, field="step")
    elif not state.interrupted and not state.held_back:
        detail = f"nothing was under way when execution {execution_id} ended: name a step"
        raise RequestError(422, detail, field="step")


def _never_entered(execution_id: ExecutionId, step: str, entered: list[StepName]) -> RequestError:
    names = ", ".join(f"`{name}`" for name in sorted(entered)[:STEPS_NAMED_MAX])
    more = len(entered) - STEPS_NAMED_MAX
    rest = f" and {more} more" if more > 0 else ""
    detail = f"execution {execution_id} never entered a step `{step}`; it entered {names or 'none'}"
    return RequestError(422, f"{detail}{rest}", field="step")


async def _check_not_archived(gateway: Gateway, execution_id: ExecutionId) -> None:
    """The log of an archived execution cannot go on: its events are no longer in the database."""
    if await gateway.results.history.is_archived(gateway.pool, execution_id):
        raise ConflictError(
            f"execution {execution_id} is past retention and in an archive: it can be read and run "
            f"again from its beginning (`noetl rerun {execution_id}`), but it cannot go on"
        )


async def _origin(gateway: Gateway, execution_id: ExecutionId) -> EventId:
    event_id = await event.started_as(gateway.pool, execution_id)
    if event_id is None:
        first = await gateway.results.history.page(
            gateway.pool, execution_id, after=EventId(0), limit=1
        )
        event_id = first[0]["event_id"] if first else None
    if event_id is None:
        raise ConflictError(
            f"execution {execution_id} has not begun: try again in a moment, or start it anew"
        )
    return event_id


def _same(gateway: Gateway, view: http.ExecutionView) -> Start:
    return Start(
        execution_id=ExecutionId(gateway.mint()),
        catalog_id=CatalogId(int(view.catalog_id)),
        path=view.path,
        version=view.version,
    )


def _inherited(state: ExecutionState) -> dict[StepName, Envelope]:
    """The results of what had ended by then. They stay where they are."""
    results = {name: step.result for name, step in state.steps.items() if step.result is not None}
    return {name: _from(state.execution_id, result) for name, result in results.items()}


def _from(origin: ExecutionId, result: Envelope) -> Envelope:
    reference = result.reference
    if reference is None or reference.execution_id is not None:
        return result
    there = msgspec.structs.replace(reference, execution_id=origin)
    return msgspec.structs.replace(result, reference=there)


_KEYED = {IDEMPOTENCY_HEADER: "A repeated request with the same key does nothing new."}

ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/api/executions/{execution_id}/signal",
        tag="control",
        summary="Tell an execution something that a step waits for",
        handle=signal,
        body=http.SignalRequest,
        headers=_KEYED,
        answers={202: http.ControlAccepted},
        problems=(400, 404, 409, 413, 415, 422),
    ),
    Endpoint(
        method="POST",
        path="/api/executions/{execution_id}/pause",
        tag="control",
        summary="Ask for an execution to be paused",
        handle=pause,
        body=http.PauseRequest,
        body_required=False,
        answers={202: http.ControlAccepted},
        problems=(400, 404, 409, 413, 415, 422),
    ),
    Endpoint(
        method="POST",
        path="/api/executions/{execution_id}/resume",
        tag="control",
        summary="Let a paused execution go on",
        handle=resume,
        answers={202: http.ControlAccepted},
        problems=(404, 409),
    ),
    Endpoint(
        method="POST",
        path="/api/executions/{execution_id}/retry",
        tag="control",
        summary="Let an execution that has ended go on",
        handle=retry,
        body=http.RetryRequest,
        body_required=False,
        answers={202: http.ControlAccepted},
        problems=(400, 404, 409, 413, 415, 422),
    ),
    Endpoint(
        method="POST",
        path="/api/executions/{execution_id}/rerun",
        tag="control",
        summary="Start the same again as a new execution",
        handle=rerun,
        body=http.RerunRequest,
        body_required=False,
        headers=_KEYED,
        answers={202: http.ExecutionAccepted},
        problems=(400, 404, 409, 413, 415, 422),
    ),
    Endpoint(
        method="POST",
        path="/api/executions/{execution_id}/fork",
        tag="control",
        summary="Start a new execution at a step of another one",
        handle=fork,
        body=http.ForkRequest,
        headers=_KEYED,
        answers={202: http.ExecutionAccepted},
        problems=(400, 404, 409, 413, 415, 422),
    ),
    Endpoint(
        method="GET",
        path="/api/executions/{execution_id}/children",
        tag="control",
        summary="List the executions that steps of this one have started",
        handle=children,
        query=http.ChildrenQuery,
        answers={200: http.ExecutionPage},
        problems=(404, 422),
    ),
)
