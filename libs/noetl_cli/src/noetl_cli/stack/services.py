"""The services as programs: all in one process and the workers beside it, or one process each."""

import asyncio
import re
import sys
from collections.abc import Mapping
from dataclasses import replace

from noetl_cli.stack.ports import HOST, choose_ports
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

HEALTH_PORT = "NOETL_HEALTH_PORT"

_ENGINE = "engine"
_NUMBER = re.compile(r"-\d+$")
_ANSWER_SECONDS = 2.0


def service_names(
    *, workers: int, is_separate: bool, brokers: int = 1, projections: int = 1
) -> list[str]:
    """The first one is, or holds, the gateway."""
    counts = {"broker": brokers, "projection": projections}
    separate = [each for name in ENGINE_SERVICES for each in _names(name, counts.get(name, 1))]
    numbers = range(1, workers + 1)
    return [*(separate if is_separate else [_ENGINE]), *(f"worker-{n}" for n in numbers)]


def service_programs(
    environment: Mapping[str, str],
    *,
    stack: str,
    gateway_port: int,
    health_ports: Mapping[str, int],
) -> list[Program]:
    """One for each of `health_ports`. `stack` tells our processes from another stack's."""
    programs = [
        # The same name after a restart: the successor has the shards and the work of the one that
        # died at once, without waiting for a lease to run out.
        on_port(_service(name, {**environment, "NOETL_INSTANCE": f"{name}-{stack}"}), port)
        for name, port in health_ports.items()
    ]
    return [replace(programs[0], is_ready=lambda: gateway_answers(gateway_port)), *programs[1:]]


def on_port(program: Program, health_port: int) -> Program:
    """The same with its health server, and so its /metrics, on that port."""
    environment = {**program.environment, HEALTH_PORT: str(health_port)}
    return replace(program, environment=environment, health_port=health_port)


def on_free_port(program: Program) -> Program:
    """Its /metrics are where they were, unless somebody has taken that port since."""
    ports = choose_ports([program.name], {program.name: program.health_port})
    return on_port(program, ports[program.name])


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


def _service(name: str, environment: Mapping[str, str]) -> Program:
    # -P: a json.py in the folder where the user happens to be is not ours.
    command = (sys.executable, "-P", "-m", "noetl_cli.stack.preload", _module_of(name))
    return Program(name=name, command=command, environment=environment, waits_for_go=True)


def _module_of(name: str) -> str:
    return "noetl_cli.stack.engine" if name == _ENGINE else main_of(_NUMBER.sub("", name))
