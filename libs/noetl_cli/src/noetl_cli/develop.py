"""`noetl dev`: a stack that serves until a signal ends it."""

import asyncio
import os

import typer

from noetl_cli.stack.services import HEALTH_PORT
from noetl_cli.stack.supervisor import StackOptions, open_stack
from noetl_cli.terminal import say


async def serve(options: StackOptions) -> None:
    if os.environ.get(HEALTH_PORT):
        say(f"{HEALTH_PORT} is not used here: each part has a port of its own (noetl dev ps)")
    async with open_stack(options, say) as supervisor:
        state = supervisor.state
        say(f"data and logs: {state.data_dir} · parts: noetl dev ps · stop: Ctrl-C")
        typer.echo(f"ready: {state.url}")
        await asyncio.Event().wait()
