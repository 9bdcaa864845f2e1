"""Why an execution stands where it stands: what is known of it from everywhere, in sentences."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from noetl_api_gateway.answers import answer
from noetl_api_gateway.endpoint import Endpoint, Gateway
from noetl_api_gateway.executions import find
from noetl_api_gateway.requests import execution_id_of
from noetl_api_gateway.standing import as_it_stands
from noetl_core.domain.explain import Facts, Holder, explain, lasting
from noetl_core.domain.ids import ExecutionId
from noetl_core.domain.state import TERMINAL, ExecutionState
from noetl_core.store import execution, waiting
from noetl_core.store.execution import StateUnreadableError
from noetl_core.store.postgres import Pool
from noetl_core.store.waiting import LastEvent, OpenCommandRow, Situation
from noetl_core.wire import http

COMMANDS_MAX = 50
CHILDREN_MAX = 3


async def tell(gateway: Gateway, request: Request) -> Response:
    execution_id = execution_id_of(request)
    view = await find(gateway.pool, execution_id)
    situation = (await waiting.situations(gateway.pool, [execution_id]))[execution_id]
    view = as_it_stands(view, situation)
    commands = await waiting.open_commands(gateway.pool, execution_id, limit=COMMANDS_MAX)
    facts = await _facts(gateway, execution_id, view, situation, commands)
    body = http.Explanation(
        execution_id=view.execution_id,
        status=view.status,
        waiting_on=view.waiting_on,
        sentences=explain(facts),
        commands=[_command(one) for one in commands],
        dead_letters=[str(one) for one in facts.dead_letters],
    )
    return answer(200, body)


async def _facts(
    gateway: Gateway,
    execution_id: ExecutionId,
    view: http.ExecutionView,
    situation: Situation,
    commands: Sequence[OpenCommandRow],
) -> Facts:
    pool = gateway.pool
    around = await waiting.surroundings(pool, execution_id)
    last = await waiting.last_event(pool, execution_id)
    steps = _steps(view.progress)
    state = await _state(pool, execution_id, view)
    return Facts(
        execution_id=view.execution_id,
        path=view.path,
        version=view.version,
        status=view.status,
        now=datetime.now(UTC),
        started_at=view.started_at,
        updated_at=view.updated_at,
        ended_at=view.ended_at,
        last_event=None if last is None else _named(last),
        last_event_at=None if last is None else last.created_at,
        steps_done=sum(step["status"] == "COMPLETED" for step in steps.values()),
        steps_seen=len(steps),
        waiting_on=view.waiting_on,
        groups=tuple(situation.groups),
        holders=tuple(_holder(one) for one in commands if one.worker_id is not None),
        children=_children(state),
        broken=state if isinstance(state, str) else None,
        shard_id=around.shard_id,
        has_broker=around.broker is not None,
        has_projection=around.projection is not None,
        lag_ms=around.lag_ms,
        messages=around.messages,
        oldest_message_seconds=around.oldest_message_seconds or 0.0,
        timer=around.timer,
        due_at=around.due_at,
        error=_error(view.error),
        last_error=await _last_error(pool, execution_id, view),
        is_flagged=situation.flag is not None,
        is_archived=view.status in TERMINAL
        and await gateway.results.history.is_archived(pool, execution_id),
        dead_letters=tuple(around.dead_letters),
    )


def _steps(progress: Any) -> dict[str, Any]:
    """A view may carry JSON as it came from the database."""
    steps: dict[str, Any] = (
        msgspec.json.decode(progress) if isinstance(progress, msgspec.Raw) else progress
    )
    return steps


def _named(event: LastEvent) -> str:
    where = "" if event.node_name is None else f" of step `{event.node_name}`"
    return f"`{event.event_type}`{where}"


def _holder(row: OpenCommandRow) -> Holder:
    return Holder(
        worker_id=row.worker_id or "",
        command_id=row.command_id,
        attempt=row.attempt,
        silent_seconds=row.silent_seconds or 0.0,
    )


async def _state(
    pool: Pool, execution_id: ExecutionId, view: http.ExecutionView
) -> ExecutionState | str | None:
    """Of one that goes on; in words if it cannot be read."""
    try:
        return None if view.status in TERMINAL else await execution.read_state(pool, execution_id)
    except StateUnreadableError as error:
        return str(error)


def _children(state: ExecutionState | str | None) -> tuple[str, ...]:
    """Executions that it waits for, not all that it has started."""
    if not isinstance(state, ExecutionState):
        return ()
    parked = [c.parked for c in state.commands.values() if c.parked is not None]
    children = sorted(str(wait.child) for wait in parked if wait.child is not None)
    return tuple(children[:CHILDREN_MAX])


async def _last_error(
    pool: Pool, execution_id: ExecutionId, view: http.ExecutionView
) -> str | None:
    found = None if view.status in TERMINAL else await waiting.last_error(pool, execution_id)
    if found is None:
        return None
    attempt = "" if found.attempt is None else f", attempt {found.attempt}"
    where = "" if found.node_name is None else f" in step `{found.node_name}`"
    ago = lasting(datetime.now(UTC) - found.created_at)
    return f"{_error(msgspec.json.decode(found.error))}{where}{attempt}, {ago} ago."


def _error(error: Any) -> str | None:
    if isinstance(error, msgspec.Raw):
        error = msgspec.json.decode(error)
    if not isinstance(error, dict):
        return None
    return f"{error.get('kind', 'error')}: {error.get('message', '')}"


def _command(row: OpenCommandRow) -> http.CommandView:
    return http.CommandView(
        command_id=row.command_id,
        step=row.step,
        status=row.status,
        pool=row.pool,
        attempt=row.attempt,
        worker_id=row.worker_id,
        heartbeat_age_seconds=row.silent_seconds,
        available_at=row.available_at,
        lease_until=row.lease_until,
    )


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/api/executions/{execution_id}/explain",
        tag="executions",
        summary="Say in a few sentences what an execution waits for, and what would move it",
        handle=tell,
        answers={200: http.Explanation},
        problems=(404,),
    ),
)
