"""Tells a running NoETL what shall become of an execution, and sees it take that up."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from noetl_cli.client import GatewayClient
from noetl_cli.execute import follow
from noetl_cli.failure import EXIT_TIMEOUT, CommandFailed
from noetl_cli.outcome import RunOutcome
from noetl_cli.target import running_target
from noetl_core.domain.state import TERMINAL
from noetl_core.wire.http import ExecutionView

TAKEN_UP_SECONDS_MAX = 10.0
_LOOK_SECONDS = 0.1
_BEGUN = frozenset({"PENDING", "RUNNING"})

Act = Callable[[GatewayClient], Awaitable[str]]
"""Does what the user wants; gives the execution that it is about from now on."""


@dataclass(frozen=True, kw_only=True)
class Controlled:
    execution_id: str
    outcome: RunOutcome | None = None
    """How it ended, where that was waited for."""


async def control(
    act: Act, *, is_followed: bool, seconds: float | None, console: Console
) -> Controlled:
    async with running_target() as target:
        execution_id = await act(target.gateway)
        if not is_followed:
            return Controlled(execution_id=execution_id)
        outcome = await follow(target, execution_id, seconds, console)
        return Controlled(execution_id=execution_id, outcome=outcome)


def cancel(execution_id: str, *, reason: str) -> Act:
    async def act(gateway: GatewayClient) -> str:
        await gateway.cancel(execution_id, reason=reason)
        return execution_id

    return act


def pause(execution_id: str, *, reason: str) -> Act:
    async def act(gateway: GatewayClient) -> str:
        await gateway.pause(execution_id, reason=reason)
        return await _until(gateway, execution_id, lambda view: view.status not in _BEGUN)

    return act


def resume(execution_id: str) -> Act:
    async def act(gateway: GatewayClient) -> str:
        await gateway.resume(execution_id)
        return await _until(gateway, execution_id, lambda view: view.status != "PAUSED")

    return act


def retry(execution_id: str, *, step: str | None, all_items: bool) -> Act:
    async def act(gateway: GatewayClient) -> str:
        before = (await gateway.execution(execution_id)).last_event_id
        await gateway.retry(execution_id, step=step, all_items=all_items)
        # It may have ended again by the time we look, so its status alone would not tell.
        return await _until(
            gateway,
            execution_id,
            lambda view: view.status not in TERMINAL or view.last_event_id != before,
        )

    return act


def rerun(execution_id: str, *, payload: dict[str, Any]) -> Act:
    async def act(gateway: GatewayClient) -> str:
        return (await gateway.rerun(execution_id, payload=payload)).execution_id

    return act


def fork(execution_id: str, *, step: str, payload: dict[str, Any]) -> Act:
    async def act(gateway: GatewayClient) -> str:
        return (await gateway.fork(execution_id, step=step, payload=payload)).execution_id

    return act


def signal(execution_id: str, *, name: str, data: Any, approved: bool, by: str) -> Act:
    async def act(gateway: GatewayClient) -> str:
        await gateway.signal(execution_id, name=name, data=data, approved=approved, by=by)
        return execution_id

    return act


async def _until(
    gateway: GatewayClient, execution_id: str, holds: Callable[[ExecutionView], bool]
) -> str:
    """The wish is stored already; whoever reads the status next should see it granted."""
    try:
        async with asyncio.timeout(TAKEN_UP_SECONDS_MAX):
            while not holds(await gateway.execution(execution_id)):  # noqa: ASYNC110 - polled
                await asyncio.sleep(_LOOK_SECONDS)
    except TimeoutError:
        raise CommandFailed(
            f"it is stored, but no broker has acted on it for {TAKEN_UP_SECONDS_MAX:g} s. "
            f"Look again: noetl status {execution_id}",
            exit_code=EXIT_TIMEOUT,
        ) from None
    return execution_id
