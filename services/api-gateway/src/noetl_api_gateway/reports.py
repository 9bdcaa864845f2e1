"""Events of other systems: what a worker of any kind says about a command it holds.

A report is a message like one from our own workers. It goes through the inbox, and the broker makes
a fact of it, or drops it: only whoever holds a command may say how it ended.
"""

import re

from starlette.requests import Request
from starlette.responses import Response

from noetl_api_gateway.answers import answer
from noetl_api_gateway.endpoint import Endpoint, Gateway
from noetl_api_gateway.executions import find
from noetl_api_gateway.promises import promise, stored
from noetl_api_gateway.requests import RequestError, json_body
from noetl_core.domain.errors import ToolError
from noetl_core.domain.ids import ID_MAX, CommandId, ExecutionId, WorkerId, parse_command_id
from noetl_core.wire import http
from noetl_core.wire.legacy_events import current_name
from noetl_core.wire.messages import Claimed, Done, Failed, Message

REPORTS_MAX = 500
"""How many events one request may carry."""

_ID = re.compile(r"[0-9]{1,19}", re.ASCII)


async def ingest(gateway: Gateway, request: Request) -> Response:
    """Take in what became of commands. Saying it twice changes nothing."""
    reports = await json_body(request, list[http.EventReport])
    if len(reports) > REPORTS_MAX:
        raise RequestError(413, f"more than {REPORTS_MAX} events in one request: send several")
    by_execution: dict[ExecutionId, list[Message]] = {}
    for number, report in enumerate(reports):
        message = _message(report, f"[{number}]")
        by_execution.setdefault(message.execution_id, []).append(message)
    for execution_id in by_execution:
        await find(gateway.pool, execution_id)
    for execution_id, messages in by_execution.items():
        await promise(gateway, execution_id, messages)
    return answer(202, http.EventsAccepted(accepted=len(reports)))


def _message(report: http.EventReport, place: str) -> Claimed | Done | Failed:
    execution_id, command_id = _execution_id(report, place), _command_id(report, place)
    worker_id = WorkerId(report.worker_id)
    value = None if report.result is None else stored(report.result, field=f"{place}.result")
    match current_name(report.event_type):
        case "command.claimed":
            return Claimed(
                execution_id=execution_id,
                command_id=command_id,
                worker_id=worker_id,
                outside=True,
            )
        case "call.done" | "loop.shard.done":
            return Done(
                execution_id=execution_id,
                command_id=command_id,
                worker_id=worker_id,
                stored=value,
                context=report.context,
                ctx=report.ctx,
                duration_ms=report.duration_ms,
                outside=True,
            )
        case "call.error" | "loop.shard.failed":
            return Failed(
                execution_id=execution_id,
                command_id=command_id,
                worker_id=worker_id,
                error=_error(report),
                stored=value,
                context=report.context,
                ctx=report.ctx,
                duration_ms=report.duration_ms,
                outside=True,
            )
        case _:
            detail = (
                f"`{report.event_type}` is not taken in: send command.claimed, call.done or "
                "call.error; all other events are the broker's"
            )
            raise RequestError(422, detail, field=f"{place}.event_type")


def _execution_id(report: http.EventReport, place: str) -> ExecutionId:
    text = str(report.execution_id)
    if _ID.fullmatch(text) and int(text) <= ID_MAX:
        return ExecutionId(int(text))
    raise RequestError(422, "not the id of an execution", field=f"{place}.execution_id")


def _command_id(report: http.EventReport, place: str) -> CommandId:
    try:
        parse_command_id(report.command_id)
    except ValueError as error:
        raise RequestError(422, str(error), field=f"{place}.command_id") from None
    return CommandId(report.command_id)


def _error(report: http.EventReport) -> ToolError:
    match report.error:
        case ToolError() as error:
            return error
        case None:
            return ToolError(kind="unknown", message="the worker gave no reason")
        case message:
            return ToolError(kind="unknown", message=message)


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/api/events",
        tag="events",
        summary="Report what became of commands",
        handle=ingest,
        body=list[http.EventReport],
        answers={202: http.EventsAccepted},
        problems=(400, 404, 413, 415, 422),
    ),
)
