"""Reads dead letters from the gateway and prints them, or has them retried and discarded."""

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from noetl_cli.target import running_target
from noetl_cli.terminal import print_json
from noetl_core.wire import http


async def print_letters(
    execution: int | None, source: str | None, *, limit: int, as_json: bool
) -> None:
    async with running_target() as target:
        items = await target.gateway.dead_letters(execution, source, limit=limit)
    if as_json:
        print_json(items)
        return
    table = Table(box=None)
    for heading in ("dead letter", "execution", "source", "since", "reason"):
        table.add_column(heading, no_wrap=heading != "reason")
    for item in items:
        since = item.created_at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        reason = Text(item.reason)
        table.add_row(item.dead_letter_id, item.execution_id or "", item.source, since, reason)
    Console().print(table)


async def print_letter(letter: str, *, as_json: bool) -> None:
    async with running_target() as target:
        found = await target.gateway.dead_letter(letter)
    if as_json:
        print_json(found)
        return
    console = Console()
    about = "" if found.execution_id is None else f" about execution {found.execution_id}"
    head = f"dead letter {found.dead_letter_id} from the {found.source}{about}"
    console.print(Text(head, style="bold"), soft_wrap=True)
    console.print(Text(f"  {found.reason}", style="red"), soft_wrap=True)
    if found.unreadable is not None:
        console.print(Text(f"  {found.unreadable}"), soft_wrap=True)
    for message in found.messages or []:
        text = msgspec.json.format(msgspec.json.encode(message)).decode()
        console.print(Text(text), soft_wrap=True)
    console.print(f"  noetl dead-letters retry {letter}  or  noetl dead-letters discard {letter}")


async def retry_letter(letter: str) -> http.DeadLetterRetried:
    async with running_target() as target:
        return await target.gateway.retry_dead_letter(letter)


async def discard_letter(letter: str) -> None:
    async with running_target() as target:
        await target.gateway.discard_dead_letter(letter)
