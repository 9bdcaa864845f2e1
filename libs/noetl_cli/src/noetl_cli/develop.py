"""`noetl dev`: a stack that serves until a signal ends it."""

import asyncio

import typer

from noetl_cli.stack.supervisor import StackOptions, open_stack
from noetl_cli.terminal import say


async def serve(options: StackOptions) -> None:
    async with open_stack(options, say) as supervisor:
        state = supervisor.state
        say(f"data and logs: {state.data_dir} · parts: noetl dev ps · stop: Ctrl-C")
        typer.echo(f"ready: {state.url}")
        await asyncio.Event().wait()
