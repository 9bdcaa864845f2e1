"""One measurement: start a system, run the workload on it, read the figures off the log."""

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import msgspec

from noetl_cli.bench import log_figures
from noetl_cli.bench.log_figures import Percentiles, percentiles
from noetl_cli.bench.usage import Usage, cpu_seconds, usage
from noetl_cli.bench.workloads import WORKLOADS, Run
from noetl_cli.bench.write_path import WritePath, measure_write_path
from noetl_cli.client import LONG_PATIENCE_SECONDS, open_gateway
from noetl_cli.failure import CommandFailed
from noetl_cli.stack.data_dir import DataDir
from noetl_cli.stack.ephemeral import ephemeral_stack
from noetl_cli.stack.processes import ProcessRecord
from noetl_cli.stack.state import StackState, read_running
from noetl_cli.stack.supervisor import StackOptions
from noetl_cli.terminal import say


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """`latency` is per task (fanout, payload), per step (chain), per execution (many, latency)."""

    bench: str
    n: int
    tasks: int
    seconds: float
    tasks_per_second: float
    latency_of: str
    p50_ms: float
    p99_ms: float
    events_per_task: float
    services: dict[str, Usage]
    cpus: int
    write_path: WritePath | None = None
    ratio_to_write_path: float | None = None


@dataclass(frozen=True, kw_only=True)
class System:
    """What is measured: where it listens, and which processes it consists of."""

    url: str
    dsn: str
    nats_url: str
    parts: Callable[[], tuple[ProcessRecord, ...]]


async def measure(name: str, *, n: int | None, data_dir: Path | None) -> Figures:
    workload, n_default = WORKLOADS[name]
    count = n or n_default
    async with running_system(data_dir) as system, open_gateway(system.url) as gateway:
        gateway.patience_seconds = LONG_PATIENCE_SECONDS
        before = system.parts()
        spent = cpu_seconds(before)
        run = await workload(gateway, count)
        _same_processes(before, system.parts())
        used = usage(before, spent)
        figures = await _read_figures(name, count, run, system, used)
        if name == "fanout":
            return _compared(figures, await measure_write_path(system.dsn, system.nats_url, count))
        return figures


@contextlib.asynccontextmanager
async def running_system(data_dir: Path | None) -> AsyncIterator[System]:
    """The one that runs in `data_dir`, else one of its own for as long as the block lasts."""
    if data_dir is not None:
        state = read_running(DataDir(data_dir))
        if state is None:
            raise CommandFailed(f"no `noetl dev` runs in {data_dir}: start it, or leave it out.")
        yield _system_of(state, lambda: _parts_in(data_dir))
        return
    # A process per service, so that each one's share can be told; and as durable as ever.
    options = StackOptions(data_dir=Path(), is_separate=True)
    async with ephemeral_stack(say, options=options) as stack:
        yield _system_of(stack.state, lambda: stack.state.parts)


def _system_of(state: StackState, parts: Callable[[], tuple[ProcessRecord, ...]]) -> System:
    return System(url=state.url, dsn=state.dsn, nats_url=state.nats_url, parts=parts)


def _parts_in(data_dir: Path) -> tuple[ProcessRecord, ...]:
    state = read_running(DataDir(data_dir))
    return () if state is None else state.parts


def _same_processes(before: tuple[ProcessRecord, ...], after: tuple[ProcessRecord, ...]) -> None:
    """Figures of a run in which something died would say little about a system that works."""
    died = sorted({part.name for part in before} - {part.name for part in after if part in before})
    if died:
        raise CommandFailed(f"{', '.join(died)} died while it was measured: there are no figures.")


async def _read_figures(
    name: str, n: int, run: Run, system: System, used: dict[str, Usage]
) -> Figures:
    connection = await asyncpg.connect(system.dsn)
    try:
        seconds = await log_figures.span_seconds(connection, run.execution_ids)
        events = await log_figures.event_count(connection, run.execution_ids)
        latency_of, latency = await _latency(name, connection, run)
    finally:
        await connection.close()
    return Figures(
        bench=name,
        n=n,
        tasks=run.task_count,
        seconds=round(seconds, 3),
        tasks_per_second=round(run.task_count / seconds, 1),
        latency_of=latency_of,
        p50_ms=latency.p50_ms,
        p99_ms=latency.p99_ms,
        events_per_task=round(events / run.task_count, 3),
        services=used,
        cpus=os.cpu_count() or 1,
    )


async def _latency(name: str, connection: asyncpg.Connection, run: Run) -> tuple[str, Percentiles]:
    if run.answer_seconds is not None:
        return "execution", percentiles([seconds * 1000 for seconds in run.answer_seconds])
    match name:
        case "chain":
            return "step", percentiles(await log_figures.step_times(connection, run.execution_ids))
        case "many":
            times = await log_figures.execution_times(connection, run.execution_ids)
            return "execution", percentiles(times)
        case _:
            return "task", percentiles(await log_figures.task_times(connection, run.execution_ids))


def _compared(figures: Figures, write_path: WritePath) -> Figures:
    ratio = round(figures.tasks_per_second / write_path.tasks_per_second, 3)
    return msgspec.structs.replace(figures, write_path=write_path, ratio_to_write_path=ratio)


def table(figures: msgspec.Struct) -> str:
    """The same for a person."""
    plain: dict[str, Any] = msgspec.to_builtins(figures)
    services = plain.pop("services")
    lines = [f"{name:<20} {value}" for name, value in plain.items() if value is not None]
    lines += [
        f"{name:<20} {used['cpu_seconds']:>8.2f} s CPU {used['peak_memory_mb']:>8.1f} MB peak"
        for name, used in services.items()
    ]
    return "\n".join(lines)
