"""What a turn records it can route on at once: results that are not in the database yet."""

from pathlib import Path
from typing import Any

import pytest

from noetl_broker.advance import Broker
from noetl_core.blob.away import StoreAwayError
from noetl_core.blob.result_store import ResultStore
from noetl_core.blob.s3 import S3
from noetl_core.blob.s3_tier import S3Tier
from noetl_core.domain.brief import decode_brief
from noetl_core.domain.ids import ExecutionId
from noetl_core.process.resilience import is_transient
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Done
from services.broker.desk import WORKER, Desk, done
from support.s3 import BUCKET, Gate, S3Server, settings

LOOP_OVER_LOOP = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: loops}
workflow:
  - step: first
    loop: {in: [1, 2, 3]}
    tool: {kind: noop}
    next: {arcs: [{step: second}]}
  - step: second
    loop: {in: "{{ first.results }}"}
    tool: {kind: noop}
"""

LARGE = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: large}
workflow:
  - step: first
    tool: {kind: noop}
    next: {arcs: [{step: second, when: "{{ output.data.rows | length == 2 }}"}]}
  - step: second
    tool: {kind: noop}
"""


@pytest.fixture
async def desk(pool: Pool) -> Desk:
    desk = Desk(pool)
    await desk.claim()
    return desk


async def elements(desk: Desk, execution_id: ExecutionId, step: str) -> list[Any]:
    briefs = [decode_brief(row.payload) for row in await desk.lease() if row.step == step]
    assert briefs, await desk.types(execution_id)
    return [brief.element and brief.element.value for brief in briefs]


async def test_a_loop_over_the_results_of_a_loop_gets_those_that_ended_it(desk: Desk) -> None:
    execution_id = await desk.start(LOOP_OVER_LOOP)
    leased = {one.command_id: one for one in await desk.lease()}
    reports = [done(execution_id, name, name) for name in leased]
    await desk.send(reports[0])
    await desk.send(*reports[1:])

    found = await elements(desk, execution_id, "second")
    assert sorted(found) == sorted(leased)


async def test_a_guard_reads_a_large_result_in_the_turn_that_records_it(
    desk: Desk, tmp_path: Path
) -> None:
    results = ResultStore(store_dir=str(tmp_path))
    desk.broker = Broker(desk.pool, results, desk.states, held=lambda: desk.claims, mint=desk.mint)
    execution_id = await desk.start(LARGE)
    (leased,) = await desk.lease()
    stored = await results.put(execution_id, leased.command_id, {"rows": ["x" * 100_000, "y"]})
    await desk.send(
        Done(
            execution_id=execution_id,
            command_id=leased.command_id,
            worker_id=WORKER,
            stored=stored,
        )
    )

    assert "step.exit" in await desk.types(execution_id)
    assert [one.step for one in await desk.lease()] == ["second"]


async def large_result(desk: Desk, results: ResultStore) -> Done:
    """A report whose guard cannot be judged without what is in S3."""
    execution_id = await desk.start(LARGE)
    (leased,) = await desk.lease()
    stored = await results.put(execution_id, leased.command_id, {"rows": ["x" * 100_000, "y"]})
    assert stored.tier == "s3"
    return Done(
        execution_id=execution_id, command_id=leased.command_id, worker_id=WORKER, stored=stored
    )


def broker_with(desk: Desk, results: ResultStore) -> Broker:
    return Broker(desk.pool, results, desk.states, held=lambda: desk.claims, mint=desk.mint)


async def test_a_decision_waits_for_an_s3_that_is_away(desk: Desk, gate: Gate) -> None:
    async with S3(settings(gate.url, timeout_seconds=10.0)) as s3:
        results = ResultStore(objects=S3Tier(s3, BUCKET))
        report = await large_result(desk, results)
        desk.broker = broker_with(desk, results)
        gate.spoil("shut")
        with pytest.raises(StoreAwayError) as away:
            await desk.send(report)
        assert is_transient(away.value)
        assert "call.done" not in await desk.types(report.execution_id)
        await gate.become("open")

        await desk.send(report)

    assert [one.step for one in await desk.lease()] == ["second"]


async def test_an_s3_that_refuses_us_ends_the_execution_and_no_other(
    desk: Desk, s3: S3, s3_server: S3Server
) -> None:
    report = await large_result(desk, ResultStore(objects=S3Tier(s3, BUCKET)))
    async with S3(settings(s3_server.url, secret_key="changed")) as refused:
        desk.broker = broker_with(desk, ResultStore(objects=S3Tier(refused, BUCKET)))
        turn = await desk.send(report)

    assert list(turn.poisoned) == [report.execution_id]
    assert "execution.failed" in await desk.types(report.execution_id)
    reason = await desk.pool.fetchval("SELECT reason FROM noetl.dead_letter")
    assert "NOETL_S3_SECRET_KEY" in reason
    assert "changed" not in reason
