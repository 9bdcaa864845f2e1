"""One playbook, run in many ways: what is recorded must not depend on who ran it where.

The keys of the events are compared as a multiset, for the execution and its children. No key has an
id or a time in it, so any difference is something that was done twice, not at all, or otherwise.
"""

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import asyncpg
import pytest
import pytest_asyncio

from chaos.stack import running_stack
from flow.conftest import PATIENT_LEASES
from support.flow import Execution, Flow
from support.postgres import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PLAYBOOK = "everything"
EXPECTED = {
    "squares": sum(number * number for number in range(40)),
    "shards": 20,
    "pages": 35,
    "shops": [5, 25, 12],
    "cells": [["a1", "a2"], ["b1", "b2"], ["c1", "c2"]],
    "rounds": 3,
}


class Way(NamedTuple):
    """How a stack is run."""

    workers: int = 2
    shards: int = 16
    broker_batch_size: int = 500
    has_nats: bool = True
    is_separate: bool = False


WAYS = {
    "one shard": Way(shards=1),
    "three shards": Way(shards=3),
    "one worker": Way(workers=1),
    "eight workers": Way(workers=8),
    "batches of one": Way(broker_batch_size=1),
    "without NATS": Way(has_nats=False),
    "a process for each service": Way(is_separate=True),
    "all of that": Way(workers=8, shards=1, broker_batch_size=1, has_nats=False, is_separate=True),
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def usual(flow: Flow) -> AsyncIterator[Counter[str]]:
    """What two workers, sixteen shards, large batches and NATS record."""
    execution = await flow.run(PLAYBOOK)
    assert execution.result("total") == EXPECTED
    yield await keys_of(flow, execution)


async def test_a_second_run_records_the_same(flow: Flow, usual: Counter[str]) -> None:
    execution = await flow.run(PLAYBOOK)

    assert await keys_of(flow, execution) == usual


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
async def test_another_way_of_running_it_records_the_same(
    flow: Flow, usual: Counter[str], way: Way, database: str, tmp_path: Path
) -> None:
    await set_shard_count(database, way.shards)
    with running(way, flow.api, database, tmp_path / "stack") as other:
        await other.prepare()
        execution = await other.run(PLAYBOOK, seconds=400.0)
        recorded = await keys_of(other, execution)
        await other.stack.client.aclose()

    assert execution.result("total") == EXPECTED
    assert recorded == usual


@contextmanager
def running(way: Way, api: str, database: str, directory: Path) -> Iterator[Flow]:
    options = ["--postgres", database, "--workers", str(way.workers)]
    if not way.has_nats:
        options += ["--nats", f"nats://127.0.0.1:{free_port()}"]
    if way.is_separate:
        options.append("--processes")
    settings = {**PATIENT_LEASES, "NOETL_BROKER_BATCH_SIZE": str(way.broker_batch_size)}
    with running_stack(directory, *options, **settings) as stack:
        yield Flow(stack, api)


async def set_shard_count(database: str, count: int) -> None:
    """Before the first process starts, so nobody holds a shard that goes."""
    conn = await asyncpg.connect(database)
    try:
        await conn.execute("DELETE FROM noetl.execution_shard WHERE shard_id >= $1", count)
        await conn.execute(
            "UPDATE noetl.setting SET value = to_jsonb($1::integer) WHERE name = 'shard_count'",
            count,
        )
    finally:
        await conn.close()


async def keys_of(flow: Flow, execution: Execution) -> Counter[str]:
    """Of the whole tree; a child's keys under the command that has called it."""
    keys = execution.keys()
    for execution_id in await flow.children(execution.execution_id):
        child = await flow.child(execution_id)
        (started,) = child.of("execution.started")
        caller = started.context["parent_command_id"]
        keys.update({f"{caller} > {key}": count for key, count in child.keys().items()})
    return keys
