"""Reads what the gateway knows of executions, and prints it."""

from datetime import datetime
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from noetl_cli.outcome import duration_seconds
from noetl_cli.progress import steps_of
from noetl_cli.summary import error_sentence, status_text, step_table
from noetl_cli.target import running_target
from noetl_cli.terminal import print_json
from noetl_core.wire.http import EventView


async def list_executions(*, limit: int, as_json: bool) -> None:
    async with running_target() as target:
        views = await target.gateway.executions(limit=limit)
    if as_json:
        print_json(views)
        return
    table = Table(box=None)
    for heading in ("execution", "playbook", "status", "started", "seconds"):
        table.add_column(heading, no_wrap=heading != "playbook")
    for view in views:
        table.add_row(
            view.execution_id,
            Text(f"{view.path} v{view.version}"),
            view.status,
            _clock(view.started_at),
            f"{duration_seconds(view):.2f}",
        )
    Console().print(table)


async def show_status(execution_id: str, *, as_json: bool) -> None:
    async with running_target() as target:
        view = await target.gateway.execution(execution_id)
        if as_json:
            print_json(view)
            return
        steps = await target.gateway.steps(execution_id)
    console = Console()
    console.print(status_text(view), soft_wrap=True)
    if view.error:
        console.print(Text(f"  {error_sentence(view.error)}", style="red"), soft_wrap=True)
    if view.waiting_on:
        console.print(Text(f"  {view.waiting_on}"), soft_wrap=True)
    console.print(step_table(steps, steps_of(view)))


async def list_events(execution_id: str, *, as_json: bool) -> None:
    console = Console()
    async with running_target() as target:
        async for event in target.gateway.events(execution_id):
            if as_json:
                print_json(event)
            else:
                console.print(Text(_line(event)), soft_wrap=True)


async def print_explanation(execution_id: str, *, as_json: bool) -> None:
    async with running_target() as target:
        found = await target.gateway.explain(execution_id)
    if as_json:
        print_json(found)
        return
    console = Console()
    for sentence in found.sentences:
        console.print(Text(sentence), soft_wrap=True)


async def list_workers(*, as_json: bool) -> None:
    async with running_target() as target:
        workers = await target.gateway.workers()
    if as_json:
        print_json(workers)
        return
    table = Table(box=None)
    for heading in ("worker", "pools", "status", "slots", "running", "free", "heard of"):
        table.add_column(heading, no_wrap=True)
    for worker in workers:
        counts = (worker.slots, worker.running, worker.free)
        table.add_row(
            worker.name,
            ", ".join(worker.pools),
            worker.status,
            *("" if count is None else str(count) for count in counts),
            f"{worker.heartbeat_age_seconds:.0f} s ago",
        )
    Console().print(table)


def _line(event: EventView) -> str:
    about = event.command_id or event.node_name or ""
    details: dict[str, Any] = {
        name: value for name, value in (("error", event.error), ("context", event.context)) if value
    }
    text = msgspec.json.encode(details).decode() if details else ""
    return f"{_clock(event.created_at)}  {event.event_type:<22} {about:<24} {text}".rstrip()


def _clock(moment: datetime) -> str:
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
