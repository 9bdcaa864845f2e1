"""The services as programs: all in one process and the workers beside it, or one process each."""

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import replace

from noetl_cli.stack.ports import HOST
from noetl_cli.stack.program import Program

ENGINE_SERVICES = (
    "api-gateway",
    "broker",
    "projection",
    "shard-manager",
    "checkpointer",
    "compactor",
    "reaper",
)
"""Everything but the workers, in the order in which they start."""

_ANSWER_SECONDS = 2.0


def service_programs(
    environment: Mapping[str, str],
    *,
    stack: str,
    gateway_port: int,
    workers: int,
    is_separate: bool,
    brokers: int = 1,
    projections: int = 1,
) -> list[Program]:
    """The first one is, or holds, the gateway. `stack` tells our processes from another stack's."""

    def service(name: str, module: str) -> Program:
        # The same name after a restart: the successor has the shards and the work of the one that
        # died at once, without waiting for a lease to run out.
        return _service(name, module, {**environment, "NOETL_INSTANCE": f"{name}-{stack}"})

    if is_separate:
        counts = {"broker": brokers, "projection": projections}
        engine = [
            service(each, main_of(name))
            for name in ENGINE_SERVICES
            for each in _names(name, counts.get(name, 1))
        ]
    else:
        engine = [service("engine", "noetl_cli.stack.engine")]
    numbers = range(1, workers + 1)
    return [
        replace(engine[0], is_ready=lambda: gateway_answers(gateway_port)),
        *engine[1:],
        *(service(f"worker-{n}", main_of("worker")) for n in numbers),
    ]


def _names(name: str, count: int) -> list[str]:
    """broker, broker-2, broker-3: a stack with more of them still has the one of before."""
    return [name, *(f"{name}-{number}" for number in range(2, count + 1))]


def main_of(service: str) -> str:
    return f"noetl_{service.replace('-', '_')}.main"


async def gateway_answers(port: int) -> bool:
    """Asked without an HTTP library, whose import would take longer than the answer."""
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: noetl\r\nConnection: close\r\n\r\n")
            status_line = await reader.readline()
            writer.close()
    except (OSError, TimeoutError):
        return False
    return b" 200 " in status_line


def _service(name: str, module: str, environment: Mapping[str, str]) -> Program:
    # -P: a json.py in the folder where the user happens to be is not ours.
    command = (sys.executable, "-P", "-m", "noetl_cli.stack.preload", module)
    return Program(name=name, command=command, environment=environment, waits_for_go=True)
