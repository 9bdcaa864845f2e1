"""A process joins the runtime: it gets an id, a snowflake node number, and keeps both by heartbeat.

The node number is a lease in Postgres. A process that was stopped for longer than the lease must
not mint another id with it, because somebody else may hold the number by now. So `mint` measures
the lease by its own clock, gives up NODE_LEASE_MARGIN_SECONDS early, and raises RetryableError
until the heartbeat has renewed the lease or taken another number.
"""

import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import structlog

from noetl_core.domain.errors import NoetlError, RetryableError
from noetl_core.domain.ids import RuntimeId
from noetl_core.domain.snowflake import Snowflake
from noetl_core.process.clock import lease_clock, unix_ms
from noetl_core.process.metrics import measured_heartbeat
from noetl_core.process.resilience import is_transient
from noetl_core.process.schema import await_schema
from noetl_core.process.service import Service
from noetl_core.process.vitals import Vitals
from noetl_core.store import runtime
from noetl_core.store.postgres import Pool
from noetl_core.store.runtime import Registration

HEARTBEAT_SECONDS = 5.0
NODE_LEASE_MARGIN_SECONDS = 10.0

log = structlog.get_logger()


class NameTakenError(NoetlError):
    """Another process registered under our name: two of them run with the same NOETL_INSTANCE."""

    def __init__(self, *, kind: str, name: str) -> None:
        super().__init__(f"another {kind} runs under the name {name!r}")
        self.kind = kind
        self.name = name


class Member:
    """This process as the others see it."""

    def __init__(
        self,
        pool: Pool,
        registration: Registration,
        clock: Callable[[], float] = lease_clock,
    ) -> None:
        self.report: Callable[[], Mapping[str, Any]] | None = None
        """What every heartbeat says of this process beside that it lives."""
        self.name = registration.name
        self.kind = registration.kind
        self._pool = pool
        self._registration = registration
        self._clock = clock
        self._runtime_id: RuntimeId | None = None
        self._snowflake: Snowflake | None = None
        self._node = -1
        self._leased_until = 0.0
        self._vitals = Vitals()

    @property
    def runtime_id(self) -> RuntimeId:
        assert self._runtime_id is not None, "heartbeat() has not run yet"
        return self._runtime_id

    @property
    def node(self) -> int:
        return self._node

    def mint(self) -> int:
        """A new id. Raises RetryableError while the node number is not surely ours."""
        if self._snowflake is None or self._clock() >= self._leased_until:
            raise RetryableError(f"the lease of node {self._node} ran out; waiting for a heartbeat")
        return self._snowflake.mint()

    def pass_over(self, floor: int) -> None:
        """Mint only above `floor` from now on."""
        assert self._snowflake is not None, "heartbeat() has not run yet"
        self._snowflake.pass_over(floor)

    async def heartbeat(self) -> None:
        """Renew the lease, or register if there is nothing to renew."""
        # Taken before the statement: Postgres starts the lease later than this, never earlier.
        asked_at = self._clock()
        with measured_heartbeat(self.kind), self._vitals.beat():
            if not await self._renew():
                await self._register()
        self._leased_until = asked_at + runtime.NODE_LEASE_SECONDS - NODE_LEASE_MARGIN_SECONDS

    async def leave(self) -> None:
        """Say goodbye; the node number stays taken until the lease runs out."""
        if self._runtime_id is not None:
            await runtime.mark_offline(self._pool, [self._runtime_id])
        self._leased_until = 0.0

    async def _renew(self) -> bool:
        if self._runtime_id is None:
            return False
        report = {**self._vitals.report(), **({} if self.report is None else self.report())}
        beat = await runtime.heartbeat(self._pool, self._runtime_id, name=self.name, report=report)
        if beat is None:
            return False
        if beat.name != self.name:
            raise NameTakenError(kind=self.kind, name=self.name)
        assert beat.node == self._node, (beat, self._node)
        return True

    async def _register(self) -> None:
        def first_id(node: int) -> int:
            return Snowflake(node, unix_ms).mint()

        async with self._pool.acquire() as conn, conn.transaction():
            runtime_id, node = await runtime.register(
                conn, self._registration, first_id, runtime_id=self._runtime_id
            )
        fresh = Snowflake(node, unix_ms)
        # Above everything this process has minted, the id of its own row included.
        fresh.pass_over(runtime_id if self._snowflake is None else self._snowflake.mint())
        self._runtime_id, self._node, self._snowflake = runtime_id, node, fresh
        log.info("runtime.registered", kind=self.kind, name=self.name, node=node)


@asynccontextmanager
async def join_runtime(
    service: Service[Any],
    pool: Pool,
    *,
    kind: str,
    name: str = "",
    capacity: int | None = None,
    labels: Mapping[str, Any] | None = None,
    capabilities: Sequence[str] = (),
    uri: str | None = None,
    runtime_type: str = "",
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
) -> AsyncIterator[Member]:
    """Register this process and keep it registered until the end of the block.

    It is the first thing that a service does with the database, so it waits for the schema here.
    `name` is what the others know it by; without one, its instance. `runtime_type` is what a worker
    is for (cpu, gpu, ...); without one, the kind says it.
    """
    await await_schema(pool)
    member = Member(
        pool,
        Registration(
            name=name or service.config.instance,
            kind=kind,
            uri=uri,
            labels=labels or {},
            capabilities=capabilities,
            capacity=capacity,
            process={
                "type": runtime_type or kind,
                "pid": os.getpid(),
                "hostname": socket.gethostname(),
                # Who is heard of seldom must not be taken for dead between two heartbeats.
                "heartbeat_interval_seconds": heartbeat_seconds,
            },
        ),
    )
    await member.heartbeat()
    service.every(heartbeat_seconds, member.heartbeat, name=f"{kind}.heartbeat")
    try:
        yield member
    finally:
        await _leave(member)


async def _leave(member: Member) -> None:
    try:
        await member.leave()
    except Exception as error:
        if not is_transient(error):
            raise
        log.warning("runtime.left_silently", name=member.name, error=str(error))
