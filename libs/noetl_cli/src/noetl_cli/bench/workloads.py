"""What is run to be measured: five playbooks and how they are started.

Everything that the figures need afterwards is in the log; only `latency` is timed by the client,
because its question is what a client waits for.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec

from noetl_cli.client import GatewayClient
from noetl_cli.failure import CommandFailed
from noetl_core.domain.state import TERMINAL

WINDOW = 500
"""Iterations of a fan-out that are open at once."""

STARTS_AT_ONCE = 32
STEPS_OF_MANY = 3
PAYLOAD_BYTES = 1_000_000
PAYLOADS_AT_ONCE = 8
IDLE_SECONDS = 0.02
WAIT_SECONDS = 30.0


class Run(NamedTuple):
    """So many tasks in these executions; seconds per answer if the client timed them."""

    execution_ids: list[int]
    task_count: int
    answer_seconds: list[float] | None = None


Workload = Callable[[GatewayClient, int], Awaitable[Run]]


async def fanout(gateway: GatewayClient, n: int) -> Run:
    step = {
        "step": "work",
        "loop": _loop(WINDOW),
        "tool": {"kind": "noop"},
    }
    path = await _register(gateway, "fanout", [step])
    return Run([await _run(gateway, path, {"n": n})], n)


async def chain(gateway: GatewayClient, n: int) -> Run:
    path = await _register(gateway, "chain", _chain_of(n))
    return Run([await _run(gateway, path, {})], n)


async def many(gateway: GatewayClient, n: int) -> Run:
    path = await _register(gateway, "many", _chain_of(STEPS_OF_MANY))
    gate = asyncio.Semaphore(STARTS_AT_ONCE)

    async def start() -> str:
        async with gate:
            return (await gateway.execute(path, version=None, payload={})).execution_id

    started = await asyncio.gather(*(start() for _ in range(n)))
    for execution_id in started:
        await _ended(gateway, execution_id)
    return Run([int(execution_id) for execution_id in started], n * STEPS_OF_MANY)


async def latency(gateway: GatewayClient, n: int) -> Run:
    path = await _register(gateway, "latency", _chain_of(1))
    await _run(gateway, path, {})
    execution_ids, seconds = [], []
    for _ in range(n):
        await asyncio.sleep(IDLE_SECONDS)
        begun = time.perf_counter()
        execution_ids.append(await _run(gateway, path, {}))
        seconds.append(time.perf_counter() - begun)
    return Run(execution_ids, n, seconds)


async def payload(gateway: GatewayClient, n: int) -> Run:
    step = {
        "step": "work",
        "loop": _loop(PAYLOADS_AT_ONCE),
        "tool": {"kind": "python", "code": f"result = {{'text': 'x' * {PAYLOAD_BYTES}}}"},
    }
    path = await _register(gateway, "payload", [step])
    return Run([await _run(gateway, path, {"n": n})], n)


WORKLOADS: dict[str, tuple[Workload, int]] = {
    "fanout": (fanout, 10_000),
    "chain": (chain, 200),
    "many": (many, 500),
    "latency": (latency, 100),
    "payload": (payload, 100),
}
"""Each with how much work it is when nothing is said."""


def _loop(max_in_flight: int) -> dict[str, Any]:
    return {
        "in": "{{ range(workload.n) | list }}",
        "iterator": "item",
        "spec": {"mode": "parallel", "max_in_flight": max_in_flight},
    }


def _chain_of(n: int) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = [
        {
            "step": f"step_{k}",
            "tool": {"kind": "noop"},
            "next": {"arcs": [{"step": f"step_{k + 1}"}]},
        }
        for k in range(1, n + 1)
    ]
    del steps[-1]["next"]
    return steps


async def _register(gateway: GatewayClient, name: str, workflow: list[dict[str, Any]]) -> str:
    document = {
        "apiVersion": "noetl.io/v2",
        "kind": "Playbook",
        "metadata": {"name": name, "path": f"bench/{name}"},
        "workload": {"n": 1},
        "workflow": workflow,
    }
    # JSON is YAML.
    content = msgspec.json.encode(document).decode()
    return (await gateway.register(content, file=name)).path


async def _run(gateway: GatewayClient, path: str, values: dict[str, Any]) -> int:
    accepted = await gateway.execute(path, version=None, payload=values)
    await _ended(gateway, accepted.execution_id)
    return int(accepted.execution_id)


async def _ended(gateway: GatewayClient, execution_id: str) -> None:
    while True:
        view = await gateway.execution(execution_id, wait=WAIT_SECONDS)
        if view.status == "COMPLETED":
            return
        if view.status in TERMINAL:
            raise CommandFailed(f"execution {execution_id} {view.status}: {view.error}")
