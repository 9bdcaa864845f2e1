"""Reads noetl.command, noetl.catalog, results and credentials. Leases rows of noetl.command.

Publishes what happened on noetl.events, or writes it to noetl.inbox when NATS is away. Decides
nothing.
"""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial

from noetl_core.bus.connection import open_bus
from noetl_core.domain.ids import WorkerId, worker_id_of
from noetl_core.domain.workers import TOOL_SLOTS_LABEL, offers_of
from noetl_core.process.membership import Member, join_runtime
from noetl_core.process.secrets import load_keyring
from noetl_core.process.service import Part, Service, run_service
from noetl_core.process.stores import open_results
from noetl_core.process.telemetry import spans
from noetl_core.store import command
from noetl_core.store.postgres import Pool, open_pool
from noetl_worker.capacity import ToolPool, capacity_report
from noetl_worker.children.pool import ChildPool
from noetl_worker.chunks import Send
from noetl_worker.config import WorkerConfig, check_config, labels_of, uri_of
from noetl_worker.credentials import Credentials
from noetl_worker.emit import Outbox
from noetl_worker.heartbeat import beating
from noetl_worker.held import Held
from noetl_worker.hiding import hide_environment
from noetl_worker.lease import Leaser
from noetl_worker.metrics import TALLY
from noetl_worker.perform import Performer
from noetl_worker.plan import Plans
from noetl_worker.sink import Sinks
from noetl_worker.tool_slots import ToolSlots, read_tool_slots
from noetl_worker.tools.approval import ApprovalTool
from noetl_worker.tools.duckdb import DuckdbTool
from noetl_worker.tools.duckdb_session import Settings
from noetl_worker.tools.fail import FailTool
from noetl_worker.tools.http import HttpTool
from noetl_worker.tools.noop import NoopTool
from noetl_worker.tools.playbook import PlaybookTool
from noetl_worker.tools.postgres import PostgresTool
from noetl_worker.tools.python import PythonTool
from noetl_worker.tools.registry import Registry, closing, with_plugins
from noetl_worker.tools.shell import ShellTool
from noetl_worker.tools.tool import Tool
from noetl_worker.tools.wait import WaitTool
from noetl_worker.tracing import CommandSpans
from noetl_worker.work import Work

POOL_SIZE_MAX = 4


async def start(service: Service[WorkerConfig]) -> None:
    config = service.config
    check_config(config)
    hide_environment()
    pool = await service.open(_open_pool(config))
    bus = await service.open(open_bus(config.nats_url, name=config.instance))
    children = _children(config)
    plans = Plans(pool)
    waiting: list[Tool] = [PlaybookTool(pool, plans), WaitTool(), ApprovalTool()]
    duckdb, postgres = _duckdb(config), PostgresTool()
    built_in = [*_built_in(config, children), duckdb, postgres, *waiting]
    tools = await service.open(closing(with_plugins(built_in)))
    limits = read_tool_slots(config.worker_tool_slots, tools.kinds)
    tool_slots = ToolSlots(limits)
    member = await service.open(_member(service, pool, tools, limits))
    worker_id = WorkerId(member.name)
    await command.give_up_all(pool, worker_id)
    held = Held()
    outbox = Outbox(bus, pool, held, worker_id)
    work = Work(
        held,
        outbox,
        await _performer(service, pool, worker_id, tools, plans, outbox.send_chunk, tool_slots),
        slots=config.worker_slots,
        is_crowded=lambda: children.waiting >= config.python_processes,
        tool_slots=tool_slots,
    )
    pools: dict[str, ToolPool] = {"python": children, "duckdb": duckdb, "postgres": postgres}
    member.report = partial(
        capacity_report, work, held, slots=config.worker_slots, tools=pools, limits=tool_slots
    )
    heartbeat = await service.open(
        beating(
            config.postgres_dsn,
            worker_id,
            held=held,
            judge=work.judge,
            heartbeat_seconds=config.heartbeat_seconds,
            lease_seconds=config.lease_seconds,
        )
    )
    leaser = Leaser(
        pool,
        bus,
        worker_id=worker_id,
        pools=config.pools,
        offers=offers_of(labels_of(config), tools.kinds),
        tool_slots=tool_slots,
        lease_seconds=config.lease_seconds,
        poll_seconds=config.poll_seconds,
        poll_away_seconds=config.poll_away_seconds,
        work=work,
    )
    heartbeat.settled_at = lambda: leaser.settled_at
    work.on_slot_freed = leaser.slot_freed
    work.on_confirmation_wanted = heartbeat.beat_now
    TALLY.held = held
    service.background(heartbeat.wait_for_death, name="heartbeat")
    _on_stop(service, pool, member, worker_id, work)
    await leaser.listen()
    service.every(config.poll_seconds, leaser.turn, wake=leaser.wake, name="lease")


def _member(
    service: Service[WorkerConfig], pool: Pool, tools: Registry, limits: Mapping[str, int]
) -> AbstractAsyncContextManager[Member]:
    config = service.config
    return join_runtime(
        service,
        pool,
        kind="worker",
        # Under the id that its leases bear: two names of one id would share their commands.
        name=worker_id_of(config.instance),
        capacity=config.worker_slots,
        labels=labels_of(config) | _limit_label(limits),
        capabilities=tools.kinds,
        uri=uri_of(config),
        runtime_type=",".join(config.pools),
        heartbeat_seconds=config.worker_heartbeat_interval,
    )


def _on_stop(
    service: Service[WorkerConfig], pool: Pool, member: Member, worker_id: WorkerId, work: Work
) -> None:
    async def goodbye() -> None:
        # First of all: brokers shall mean nobody who is about to go. They look every two seconds.
        await member.leave()
        await command.leave_to_others(pool, worker_id)

    # The last one first.
    service.on_stop(lambda: command.leave_to_others(pool, worker_id))
    service.on_stop(lambda: work.drain(pool, worker_id, seconds=service.config.drain_seconds))
    service.on_stop(goodbye)


def _open_pool(config: WorkerConfig) -> AbstractAsyncContextManager[Pool]:
    # Losing a lease when Postgres crashes re-runs something that was not reported yet.
    return open_pool(
        config.postgres_dsn,
        role="noetl_worker",
        size_max=POOL_SIZE_MAX,
        settings=command.QUEUE_SETTINGS | {"synchronous_commit": "off"},
    )


def _children(config: WorkerConfig) -> ChildPool:
    return ChildPool(
        size=config.python_processes,
        memory_mb=config.python_memory_mb,
        cpu_seconds=config.python_cpu_seconds,
    )


def _duckdb(config: WorkerConfig) -> DuckdbTool:
    settings = Settings(
        memory_mb=config.duckdb_memory_mb,
        threads=config.duckdb_threads,
        extension_dir=config.duckdb_extension_dir,
    )
    return DuckdbTool(settings, calls_max=config.duckdb_calls)


def _built_in(config: WorkerConfig, children: ChildPool) -> list[Tool]:
    return [
        NoopTool(),
        FailTool(),
        PythonTool(children),
        ShellTool(memory_mb=config.shell_memory_mb, cpu_seconds=config.shell_cpu_seconds),
        HttpTool(),
    ]


async def _performer(
    service: Service[WorkerConfig],
    pool: Pool,
    worker_id: WorkerId,
    tools: Registry,
    plans: Plans,
    send_chunk: Send,
    tool_slots: ToolSlots,
) -> Performer:
    config = service.config
    keyring = load_keyring(config.encryption_key) if config.encryption_key else None
    cache_bytes = config.result_cache_mb * 1024 * 1024
    told = spans("worker")
    return Performer(
        pool,
        worker_id=worker_id,
        plans=plans,
        results=await service.open(open_results(config, cache_bytes=cache_bytes)),
        tools=tools,
        credentials=Credentials(pool, keyring),
        sink=Sinks(tools),
        send_chunk=send_chunk,
        tool_slots=tool_slots,
        spans=None if told is None else CommandSpans(told),
    )


def _limit_label(limits: Mapping[str, int]) -> dict[str, str]:
    """The broker reads it: the queue must know which commands need a tool that is limited."""
    text = ",".join(f"{kind}={limit}" for kind, limit in limits.items())
    return {TOOL_SLOTS_LABEL: text} if limits else {}


SERVICE = Part("worker", WorkerConfig, start)


def main() -> None:
    run_service(*SERVICE)
