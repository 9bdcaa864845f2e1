"""`noetl run`: register a playbook, start it, show how it goes, say what came out."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from noetl_cli.client import LONG_PATIENCE_SECONDS, GatewayClient
from noetl_cli.failure import EXIT_USAGE, CommandFailed
from noetl_cli.outcome import RunOutcome
from noetl_cli.progress import Display, open_display
from noetl_cli.target import URL_VARIABLE, Target, any_target, is_running
from noetl_cli.validation import read_playbook
from noetl_core.domain.state import TERMINAL
from noetl_core.wire import http

_LOOK_SECONDS = 0.25
_FILE_ENDINGS = {".yaml", ".yml"}


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """`content` is the playbook's text when a file is run, None for a path of the catalog."""

    name: str
    content: str | None
    payload: dict[str, Any]
    timeout_seconds: float | None = None


def read_request(
    file_or_path: str, *, payload: dict[str, Any], timeout_seconds: float | None
) -> RunRequest:
    """A file is read and checked here and now; anything else is a path of the catalog."""
    file = Path(file_or_path)
    is_file = file.is_file() or file.suffix in _FILE_ENDINGS
    return RunRequest(
        name=file_or_path,
        content=read_playbook(file).content if is_file else None,
        payload=payload,
        timeout_seconds=timeout_seconds,
    )


async def run(request: RunRequest, console: Console) -> RunOutcome:
    if request.content is None and not await is_running():
        raise CommandFailed(
            f"{request.name} is no file, and no NoETL is running whose catalog could have it: "
            f"name a file, start `noetl dev`, or set {URL_VARIABLE}.",
            exit_code=EXIT_USAGE,
        )
    async with any_target(lambda line: _say(console, line)) as target:
        accepted = await _start(target.gateway, request)
        execution_id = accepted.execution_id
        _say(console, f"execution {execution_id} of {accepted.path} version {accepted.version}")
        return await follow(target, execution_id, request.timeout_seconds, console)


async def follow(
    target: Target, execution_id: str, seconds: float | None, console: Console
) -> RunOutcome:
    """Show how an execution goes until it has ended, or for so many seconds."""
    try:
        return await _watch(target, execution_id, seconds, console)
    except asyncio.CancelledError:
        _say(console, _farewell(target, execution_id))
        raise


async def _start(gateway: GatewayClient, request: RunRequest) -> http.ExecutionAccepted:
    path, version = request.name, None
    if request.content is not None:
        registered = await gateway.register(request.content, file=request.name)
        path, version = registered.path, registered.version
    return await gateway.execute(path, version=version, payload=request.payload)


async def _watch(
    target: Target, execution_id: str, seconds: float | None, console: Console
) -> RunOutcome:
    gateway = target.gateway
    gateway.patience_seconds = LONG_PATIENCE_SECONDS
    is_timeout = False
    with open_display(console) as display:
        try:
            async with asyncio.timeout(seconds):
                await _until_ended(gateway, execution_id, display)
        except TimeoutError:
            is_timeout = True
    view = await gateway.execution(execution_id)
    if is_timeout:
        _say(console, f"not ended after {seconds:g} s. {_farewell(target, execution_id)}")
    return RunOutcome(
        view=view,
        steps=await gateway.steps(execution_id),
        url=gateway.url,
        is_ephemeral=target.is_ephemeral,
        is_timeout=is_timeout,
    )


async def _until_ended(gateway: GatewayClient, execution_id: str, display: Display) -> None:
    while True:
        view = await gateway.execution(execution_id, wait=_LOOK_SECONDS)
        display.show(view)
        if view.status in TERMINAL:
            return


def _farewell(target: Target, execution_id: str) -> str:
    if target.is_ephemeral:
        return "The execution ends with the temporary NoETL it ran on; `noetl dev` keeps one."
    return (
        f"The execution goes on. Watch it: noetl status {execution_id} "
        f"· end it: noetl cancel {execution_id}"
    )


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
