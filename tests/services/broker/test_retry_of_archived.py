"""A retry that was promised while the log was there is not recorded when the log has gone."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from noetl_compactor.archive import Rules, archive_past
from noetl_core.blob.file_place import FilePlace
from noetl_core.domain.errors import ToolError
from noetl_core.domain.ids import ExecutionId
from noetl_core.domain.retention import DAY_MS
from noetl_core.process.clock import unix_ms
from noetl_core.store.postgres import Pool, open_pool
from noetl_core.wire.messages import Failed, Message, Retry, decode_messages
from services.projection.test_project import project_all, take_over

from .desk import WORKER, Desk, claimed, done, letter_of

PLAYBOOK = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: a, path: a}
workflow:
  - step: each
    loop: {in: [1, 2, 3, 4], iterator: item}
    tool: {kind: noop}
"""


@pytest.fixture
async def compactor_pool(database: str) -> AsyncIterator[Pool]:
    async with open_pool(database, role="noetl_compactor", size_max=2) as opened:
        yield opened


@pytest.fixture
async def desk(pool: Pool) -> Desk:
    desk = Desk(pool)
    await desk.claim()
    return desk


async def a_failed_loop(desk: Desk) -> ExecutionId:
    """Its last item failed, the others are done; the projection knows."""
    execution_id = await desk.start(PLAYBOOK)
    for leased in await desk.lease():
        ended: Message = done(execution_id, leased.command_id, 1)
        if "/3#" in leased.command_id:
            error = ToolError(kind="boom", message="no")
            ended = Failed(
                execution_id=execution_id,
                command_id=leased.command_id,
                worker_id=WORKER,
                error=error,
            )
        await desk.send(claimed(execution_id, leased.command_id), ended)
    await project_all(desk.pool, await take_over(desk.pool, owner=9))
    return execution_id


def cold(desk: Desk) -> Desk:
    """A broker that has the same shards and remembers nothing."""
    other = Desk(desk.pool, owner=desk.owner)
    other.claims = desk.claims
    return other


@pytest.mark.parametrize("is_cold", [True, False])
async def test_a_retry_that_comes_after_its_log_was_archived_appends_nothing(
    desk: Desk, pool: Pool, compactor_pool: Pool, tmp_path: Path, *, is_cold: bool
) -> None:
    execution_id = await a_failed_loop(desk)
    rules = Rules(FilePlace(tmp_path), desk.mint, unix_ms() + 15 * DAY_MS)
    assert await archive_past(compactor_pool, rules) > 0
    other = await desk.start(PLAYBOOK)

    broker = cold(desk) if is_cold else desk
    await broker.send(Retry(execution_id=execution_id))

    assert await desk.types(execution_id) == []
    assert {leased.execution_id for leased in await desk.lease()} == {other}
    (letter,) = await pool.fetch("SELECT execution_id, body, reason FROM noetl.dead_letter")
    assert letter["execution_id"] == execution_id
    assert "went into an archive" in letter["reason"]
    assert decode_messages(letter["body"]) == [Retry(execution_id=execution_id)]
    assert await pool.fetchval("SELECT status FROM noetl.execution") == "FAILED"


async def test_a_retry_beside_it_in_the_same_turn_goes_on(
    desk: Desk, pool: Pool, compactor_pool: Pool, tmp_path: Path
) -> None:
    archived = await a_failed_loop(desk)
    rules = Rules(FilePlace(tmp_path), desk.mint, unix_ms() + 15 * DAY_MS)
    await archive_past(compactor_pool, rules)
    there = await a_failed_loop(desk)

    await desk.broker.advance([letter_of(Retry(execution_id=e)) for e in (archived, there)])

    assert await desk.types(archived) == []
    assert "execution.retried" in await desk.types(there)
    assert {leased.execution_id for leased in await desk.lease()} == {there}
