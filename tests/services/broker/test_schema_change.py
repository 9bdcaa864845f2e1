"""A schema that changes under a broker ends no execution: it goes on, or waits until one fits."""

import re
from collections.abc import Awaitable, Callable

import asyncpg
import pytest

from noetl_core.domain.ids import ExecutionId
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Message
from services.broker.desk import Desk, claimed, done

CHAIN = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: chain}
workflow:
  - step: first
    tool: {kind: noop}
    next: {arcs: [{step: second}]}
  - step: second
    loop: {in: [1, 2], iterator: item}
    tool: {kind: noop}
"""


@pytest.fixture
async def desk(pool: Pool) -> Desk:
    desk = Desk(pool)
    await desk.claim()
    return desk


async def definition(pool: Pool) -> str:
    found = await pool.fetchval("SELECT pg_get_functiondef('noetl.commit_batch'::regproc)")
    return str(found)


async def replace_with_default_argument(pool: Pool) -> None:
    """As a migration does it that gives the function another argument."""
    text = (await definition(pool)).replace("OR REPLACE ", "")
    text = re.sub(r"inbox_ids bigint\[\]\)", "inbox_ids bigint[], extra integer DEFAULT 0)", text)
    assert "extra integer" in text
    await pool.execute(f"BEGIN; DROP FUNCTION noetl.commit_batch; {text}; COMMIT")


async def replace_with_another_result(pool: Pool) -> None:
    text = (
        (await definition(pool)).replace("OR REPLACE ", "").replace("RETURNS void", "RETURNS int")
    )
    text = re.sub(r"END\s+\$function\$", "RETURN 1; END $function$", text)
    await pool.execute(f"BEGIN; DROP FUNCTION noetl.commit_batch; {text}; COMMIT")


async def replace_with_itself(pool: Pool) -> None:
    await pool.execute(await definition(pool))


@pytest.mark.parametrize(
    "change", [replace_with_itself, replace_with_default_argument, replace_with_another_result]
)
@pytest.mark.parametrize("step", ["first", "second"])
async def test_a_commit_function_that_was_replaced_is_called_as_before(
    desk: Desk, change: Callable[[Pool], Awaitable[None]], step: str
) -> None:
    """What follows from `first` has rows beside the log and so a transaction; `second` has none."""
    execution_id = await desk.start(CHAIN)
    if step == "second":
        await finish_one(desk)
    await change(desk.pool)

    await desk.run()

    assert (await desk.types(execution_id))[-1] == "execution.completed"
    assert await desk.pool.fetchval("SELECT count(*) FROM noetl.dead_letter") == 0


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (
            "ALTER TABLE noetl.manifest RENAME COLUMN part_count TO parts",
            "ALTER TABLE noetl.manifest RENAME COLUMN parts TO part_count",
        ),
        (
            "ALTER FUNCTION noetl.commit_batch RENAME TO other",
            "ALTER FUNCTION noetl.other RENAME TO commit_batch",
        ),
        (
            "ALTER TABLE noetl.command RENAME COLUMN step TO name",
            "ALTER TABLE noetl.command RENAME COLUMN name TO step",
        ),
    ],
    ids=["beside", "function", "inside"],
)
async def test_a_schema_that_does_not_fit_ends_no_execution(
    desk: Desk, wrong: str, right: str
) -> None:
    execution_id = await desk.start(CHAIN)
    leased = (await desk.lease())[0]
    before = await desk.types(execution_id)
    messages: list[Message] = [
        claimed(leased.execution_id, leased.command_id),
        done(leased.execution_id, leased.command_id, None),
    ]
    await desk.pool.execute(wrong)

    with pytest.raises(asyncpg.exceptions.SyntaxOrAccessError):
        await desk.send(*messages)

    assert await desk.types(execution_id) == before
    await desk.pool.execute(right)
    await desk.send(*messages)
    await desk.run()
    assert (await desk.types(execution_id))[-1] == "execution.completed"
    assert await desk.pool.fetchval("SELECT count(*) FROM noetl.dead_letter") == 0


async def finish_one(desk: Desk) -> ExecutionId:
    leased = (await desk.lease())[0]
    await desk.send(
        claimed(leased.execution_id, leased.command_id),
        done(leased.execution_id, leased.command_id, None),
    )
    return leased.execution_id
