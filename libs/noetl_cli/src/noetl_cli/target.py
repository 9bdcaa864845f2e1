"""Which NoETL a command talks to: NOETL_URL, else the running `noetl dev`, else one of its own."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

from noetl_cli.client import GatewayClient, open_gateway
from noetl_cli.failure import CommandFailed
from noetl_cli.stack.data_dir import DataDir, default_data_dir
from noetl_cli.stack.ephemeral import ephemeral_stack
from noetl_cli.stack.state import StackState, read_running
from noetl_cli.stack.supervisor import Report

URL_VARIABLE = "NOETL_URL"

_START_SECONDS_MAX = 60.0
_START_POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Target:
    gateway: GatewayClient
    is_ephemeral: bool = False


@contextlib.asynccontextmanager
async def running_target() -> AsyncIterator[Target]:
    """For commands about what ran before: there must be a NoETL that knows of it."""
    url = await _running_url()
    if url is None:
        raise CommandFailed(
            f"no NoETL is running here: start one with `noetl dev`, or set {URL_VARIABLE}."
        )
    async with open_gateway(url) as gateway:
        yield Target(gateway=gateway)


@contextlib.asynccontextmanager
async def any_target(report: Report) -> AsyncIterator[Target]:
    url = await _running_url()
    if url is not None:
        async with open_gateway(url) as gateway:
            yield Target(gateway=gateway)
        return
    report("no NoETL is running: starting a temporary one")
    async with ephemeral_stack(report) as stack, open_gateway(stack.state.url) as gateway:
        yield Target(gateway=gateway, is_ephemeral=True)


async def is_running() -> bool:
    return await _running_url() is not None


async def _running_url() -> str | None:
    named = os.environ.get(URL_VARIABLE)
    if named:
        return named.rstrip("/")
    stack = await _ready_stack(DataDir(default_data_dir()))
    return None if stack is None else stack.url


async def _ready_stack(data_dir: DataDir) -> StackState | None:
    """A `noetl dev` that is just starting is waited for, rather than passed by."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _START_SECONDS_MAX
    state = read_running(data_dir)
    while state is not None and not state.is_ready and loop.time() < deadline:
        await asyncio.sleep(_START_POLL_SECONDS)
        state = read_running(data_dir)
    return state
