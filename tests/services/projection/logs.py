"""Logs of executions to project: random, but each one a log that a broker could have written."""

import itertools
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from noetl_core.domain.envelope import Envelope, ParentReference, Reference
from noetl_core.domain.errors import ToolError
from noetl_core.domain.events import (
    AnyFact,
    CallDone,
    CallFailed,
    CheckpointCommitted,
    CommandClaimed,
    CommandExpired,
    CommandIssued,
    Event,
    ExecutionCompleted,
    ExecutionFailed,
    ExecutionStarted,
    Hop,
    LoopDone,
    LoopStarted,
    StepEntered,
    StepExited,
)
from noetl_core.domain.ids import (
    CatalogId,
    EpochId,
    EventId,
    ExecutionId,
    LoopId,
    RefId,
    ShardId,
    StepName,
    WorkerId,
    command_id,
)
from noetl_core.domain.sharding import shard_of
from noetl_core.store.event import EventRow, event_row
from noetl_core.store.postgres import Connection, Pool

SHARD_COUNT = 16
FIRST_EXECUTION = 3_000_000_000_000_000_000
_T0 = datetime(2026, 11, 18, 8, 0, tzinfo=UTC)


class Logged(msgspec.Struct, frozen=True):
    event: Event
    shard_id: ShardId
    created_at: datetime


def shard(execution_id: int) -> ShardId:
    return shard_of(ExecutionId(execution_id), shard_count=SHARD_COUNT)


def interleaved(seed: int, executions: int, *, items: int = 4) -> list[Logged]:
    """The logs of several executions, mixed as brokers would commit them: ids ascend, times too."""
    chance = random.Random(seed)
    ids = itertools.count(FIRST_EXECUTION * 2)
    lives = [
        _life(chance, ExecutionId(FIRST_EXECUTION + n * 7919), ids, items)
        for n in range(executions)
    ]
    logged: list[Logged] = []
    while lives:
        life = chance.choice(lives)
        event = next(life, None)
        if event is None:
            lives.remove(life)
            continue
        at = _T0 + timedelta(milliseconds=3 * len(logged))
        logged.append(Logged(event, shard(event.execution_id), at))
    return logged


def _life(
    chance: random.Random, execution_id: ExecutionId, ids: Iterator[int], items: int
) -> Iterator[Event]:
    """One execution: a few steps, one of them a loop; it ends, fails, or is still running."""

    def event(fact: AnyFact) -> Event:
        return Event(execution_id=execution_id, event_id=EventId(next(ids)), fact=fact)

    yield event(
        ExecutionStarted(catalog_id=CatalogId(77), path="demo/flow", version=3, result=_result(1))
    )
    for number, step in enumerate(("load", "fetch", "store")):
        name = StepName(step)
        yield event(StepEntered(step=name, visit=1, parent_ref=number))
        if step == "fetch":
            yield from _loop(chance, event, name, items)
        else:
            yield from _call(chance, event, name)
        if chance.random() < 0.1:
            return
        hops = () if step == "store" else (Hop(step=StepName(f"after_{step}")),)
        ctx = {f"seen.{step}": chance.random(), "name": "ünïcode", "deep": {"list": [1, 2.5, None]}}
        yield event(StepExited(step=name, visit=1, result=_result(number), hops=hops, ctx=ctx))
        if chance.random() < 0.3:
            yield event(CheckpointCommitted(barrier=EpochId(next(ids))))
    if chance.random() < 0.3:
        error = ToolError(kind="http", message="no answer", code="504", details={"tries": 3})
        yield event(ExecutionFailed(error=error, step=StepName("store")))
    else:
        yield event(ExecutionCompleted(result=_result(9)))


def _call(
    chance: random.Random,
    event: Callable[[AnyFact], Event],
    step: StepName,
    *,
    loop_id: LoopId | None = None,
    index: int | None = None,
) -> Iterator[Event]:
    for attempt in itertools.count(1):
        shared: Any = {
            "step": step,
            "visit": 1,
            "command_id": command_id(step, 1, index=index, attempt=attempt),
            "attempt": attempt,
            "loop_id": loop_id,
            "iter_index": index,
        }
        worker = WorkerId(f"worker-{chance.randrange(3)}")
        yield event(CommandIssued(**shared))
        yield event(CommandClaimed(**shared, worker_id=worker))
        if attempt < 3 and chance.random() < 0.2:
            lost = ToolError(kind="lease", message="the lease ran out", retryable=True)
            yield event(CommandExpired(**shared, error=lost))
            continue
        if index is not None and chance.random() < 0.2:
            broken = ToolError(kind="http", message="bad gateway")
            result = Envelope(status="error")
            yield event(CallFailed(**shared, worker_id=worker, result=result, error=broken))
        else:
            ctx = {"cursor": chance.randrange(100), f"seen.{step}_{index}": attempt}
            yield event(CallDone(**shared, worker_id=worker, result=_result(2), ctx=ctx))
        return


def _loop(
    chance: random.Random, event: Callable[[AnyFact], Event], step: StepName, items: int
) -> Iterator[Event]:
    started = event(
        LoopStarted(step=step, visit=1, total=items, part_size=100, parts=1, max_in_flight=10)
    )
    yield started
    loop_id = LoopId(started.event_id)
    calls = [_call(chance, event, step, loop_id=loop_id, index=i) for i in range(items)]
    failed = 0
    while calls:
        call = chance.choice(calls)
        one = next(call, None)
        if one is None:
            calls.remove(call)
            continue
        failed += isinstance(one.fact, CallFailed)
        yield one
    yield event(
        LoopDone(
            step=step,
            visit=1,
            loop_id=loop_id,
            total=items,
            done=items - failed,
            failed=failed,
            status="ok",
        )
    )


def _result(ref: int) -> Envelope:
    return Envelope(
        status="ok",
        reference=Reference(ref_id=RefId(ref), type="db", bytes=12),
        parent_ref=ParentReference(ref_id=None),
        context={"rows.count": ref, "ratio": 0.1},
    )


_INSERT = """
INSERT INTO noetl.event (
    execution_id, event_id, event_key, shard_id, event_type, status, node_name, command_id,
    loop_id, iter_index, attempt, parent_event_id, parent_execution_id, catalog_id, epoch_id,
    context, result, meta, error, created_at
)
SELECT * FROM unnest(
    $1::bigint[], $2::bigint[], $3::text[], $4::integer[], $5::text[], $6::text[], $7::text[],
    $8::text[], $9::bigint[], $10::integer[], $11::integer[], $12::bigint[], $13::bigint[],
    $14::bigint[], $15::bigint[], $16::jsonb[], $17::jsonb[], $18::jsonb[], $19::jsonb[],
    $20::timestamptz[]
)
"""


async def append(conn: Connection | Pool, logged: list[Logged]) -> None:
    """Put the events into the log as they are, with their times."""
    rows = [(*row_of(one), one.created_at) for one in logged]
    if rows:
        await conn.execute(_INSERT, *zip(*rows, strict=True))


def row_of(one: Logged) -> EventRow:
    return event_row(one.event, shard_id=one.shard_id, epoch_id=None)
