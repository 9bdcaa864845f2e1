"""One turn of the broker against a real Postgres."""

import asyncpg
import msgspec
import pytest

from noetl_broker.accept import COMMAND_ATTEMPTS_MAX
from noetl_core.domain.brief import decode_brief
from noetl_core.domain.errors import ShardLostError, ToolError
from noetl_core.domain.ids import CommandId, ExecutionId, RuntimeId, WorkerId
from noetl_core.store import command
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import (
    Cancel,
    Claimed,
    Done,
    Expired,
    Failed,
    Reconcile,
    Retry,
    Start,
    Stored,
)
from services.broker.desk import WORKER, Desk, claimed, done, letter_of

CHAIN = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: chain}
workflow:
  - step: first
    tool: {kind: noop}
    next: {arcs: [{step: second, when: "{{ output.data.go }}"}]}
  - step: second
    tool: {kind: noop}
"""

LOOP = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: loop}
workload: {items: [a, b, c, d, e]}
workflow:
  - step: each
    loop: {in: "{{ workload.items }}", iterator: item, spec: {max_in_flight: 2}}
    tool: {kind: noop}
"""


LOOP_OVER_LOOP = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: twice}
workload: {items: [a, b, c]}
workflow:
  - step: each
    loop: {in: "{{ workload.items }}", iterator: item}
    tool: {kind: noop}
    next: {arcs: [{step: again}]}
  - step: again
    loop: {in: "{{ each.results }}", iterator: item}
    tool: {kind: noop}
"""


@pytest.fixture
async def desk(pool: Pool) -> Desk:
    desk = Desk(pool)
    await desk.claim()
    return desk


async def test_a_plain_step_is_five_events_and_the_execution_ends_once(desk: Desk) -> None:
    execution_id = await desk.start(CHAIN)
    await desk.run({"first": {"go": True}})

    step = ["step.enter", "command.issued", "command.claimed", "call.done", "step.exit"]
    assert await desk.types(execution_id) == [
        "execution.started",
        *step,
        *step,
        "execution.completed",
    ]
    assert await desk.pool.fetchval("SELECT count(*) FROM noetl.command") == 0


async def test_an_iteration_is_three_events_and_the_window_is_never_passed(desk: Desk) -> None:
    execution_id = await desk.start(LOOP)
    assert len(await desk.lease()) == 2
    await desk.pool.execute("UPDATE noetl.command SET status = 'pending', worker_id = NULL")
    await desk.run()

    types = await desk.types(execution_id)
    for kind in ("command.issued", "command.claimed", "call.done"):
        assert types.count(kind) == 5
    assert types.count("loop.started") == types.count("loop.done") == 1
    assert types[-1] == "execution.completed"


async def test_every_message_may_come_twice_and_nothing_is_recorded_twice(desk: Desk) -> None:
    execution_id = await desk.start(CHAIN)
    (leased,) = await desk.lease()
    messages = (
        claimed(execution_id, leased.command_id),
        done(execution_id, leased.command_id, {"go": False}),
    )
    await desk.send(*messages, *messages)
    before = await desk.types(execution_id)
    await desk.send(*messages)

    assert await desk.types(execution_id) == before
    assert before.count("call.done") == 1


async def test_a_broker_that_lost_its_memory_goes_on_from_the_log(desk: Desk) -> None:
    execution_id = await desk.start(LOOP)
    leased = await desk.lease()
    desk.states.drop([execution_id])
    await desk.send(*[done(execution_id, one.command_id, 1) for one in leased])
    desk.states.drop([execution_id])
    await desk.run()

    types = await desk.types(execution_id)
    assert types.count("call.done") == 5
    assert types.count("execution.completed") == 1


async def test_a_commit_whose_answer_was_lost_is_found_out_and_not_repeated(desk: Desk) -> None:
    execution_id = await desk.start(CHAIN)
    (leased,) = await desk.lease()
    report = done(execution_id, leased.command_id, {"go": False})
    twin = Desk(desk.pool)
    twin.claims = desk.claims
    twin.snowflake.pass_over(desk.mint())
    await twin.send(report)

    turn = await desk.send(report)

    assert (await desk.types(execution_id)).count("call.done") == 1
    assert not turn.batch.events


async def test_a_start_that_comes_again_after_the_state_was_dropped_changes_nothing(
    desk: Desk,
) -> None:
    execution_id = await desk.start(CHAIN)
    catalog_id = await desk.pool.fetchval(
        "SELECT catalog_id FROM noetl.event WHERE execution_id = $1 AND event_key = 'start'",
        execution_id,
    )
    desk.states.drop([execution_id])
    await desk.send(Start(execution_id=execution_id, catalog_id=catalog_id, path="p", version=1))

    assert (await desk.types(execution_id)).count("execution.started") == 1


async def test_a_broker_whose_shard_was_taken_over_writes_nothing(desk: Desk) -> None:
    execution_id = await desk.start(CHAIN)
    (leased,) = await desk.lease()
    await desk.pool.execute("UPDATE noetl.execution_shard SET leased_until = now() - interval '1s'")
    await Desk(desk.pool, RuntimeId(2)).claim()
    before = await desk.types(execution_id)

    with pytest.raises(ShardLostError):
        await desk.send(done(execution_id, leased.command_id, {"go": True}))

    assert await desk.types(execution_id) == before


async def test_a_completion_from_a_worker_without_the_lease_is_refused_and_audited(
    desk: Desk,
) -> None:
    execution_id = await desk.start(CHAIN)
    (leased,) = await desk.lease()
    other = WorkerId("somebody-else")

    await desk.send(done(execution_id, leased.command_id, {"go": False}, other))

    assert "call.done" not in await desk.types(execution_id)
    audit = await desk.pool.fetchrow("SELECT actor, subject FROM noetl.audit")
    assert audit is not None
    assert (audit["actor"], audit["subject"]) == (other, leased.command_id)
    await desk.send(done(execution_id, leased.command_id, {"go": False}, WORKER))
    assert "execution.completed" in await desk.types(execution_id)


async def test_an_expired_attempt_is_issued_again_and_its_late_result_is_dropped(
    desk: Desk,
) -> None:
    execution_id = await desk.start(CHAIN)
    (leased,) = await desk.lease()
    await desk.lose(leased.command_id)
    await desk.send(done(execution_id, leased.command_id, {"go": False}))

    (again,) = await desk.lease()
    assert again.command_id == "first.1#2"
    assert "call.done" not in await desk.types(execution_id)


async def test_a_command_that_is_lost_too_often_fails_its_step(desk: Desk) -> None:
    execution_id = await desk.start(CHAIN)
    for attempt in range(1, COMMAND_ATTEMPTS_MAX + 1):
        await desk.lease()
        await desk.lose(CommandId(f"first.1#{attempt}"))

    types = await desk.types(execution_id)
    assert types.count("command.expired") == COMMAND_ATTEMPTS_MAX
    assert types[-2:] == ["step.failed", "execution.failed"]
    set_aside = await desk.pool.fetchrow("SELECT source, execution_id FROM noetl.dead_letter")
    assert set_aside is not None, "somebody should look at what kills workers"
    assert (set_aside["source"], set_aside["execution_id"]) == ("command", execution_id)


async def test_a_lease_that_was_renewed_after_the_report_is_not_taken_away(desk: Desk) -> None:
    execution_id = await desk.start(CHAIN)
    (leased,) = await desk.lease()
    await desk.pool.execute("UPDATE noetl.command SET lease_until = now() - interval '1 min'")
    late = Expired(execution_id=execution_id, command_id=leased.command_id, reason="gone")
    await command.heartbeat(desk.pool, WORKER, [leased.key], lease_seconds=60)

    await desk.send(late)

    assert "command.expired" not in await desk.types(execution_id)
    await desk.send(done(execution_id, leased.command_id, {"go": False}))
    assert (await desk.types(execution_id))[-1] == "execution.completed"


async def test_a_command_that_nobody_has_taken_is_not_lost(desk: Desk) -> None:
    execution_id = await desk.start(CHAIN)
    first = CommandId("first.1#1")

    await desk.send(Expired(execution_id=execution_id, command_id=first, reason="gone"))

    assert "command.expired" not in await desk.types(execution_id)
    assert [one.command_id for one in await desk.lease()] == [first]


async def test_a_command_without_a_row_is_lost(desk: Desk) -> None:
    execution_id = await desk.start(CHAIN)
    await desk.pool.execute("DELETE FROM noetl.command")
    first = CommandId("first.1#1")

    await desk.send(Expired(execution_id=execution_id, command_id=first, reason="gone"))

    assert [one.command_id for one in await desk.lease()] == ["first.1#2"]


async def test_a_command_that_workers_give_back_when_they_stop_is_never_lost_too_often(
    desk: Desk,
) -> None:
    execution_id = await desk.start(CHAIN)
    for attempt in range(1, 2 * COMMAND_ATTEMPTS_MAX):
        await desk.lease()
        await desk.lose(CommandId(f"first.1#{attempt}"), given_back=True)
    returned = 2 * COMMAND_ATTEMPTS_MAX - 1
    reason = await desk.pool.fetchval(
        "SELECT error->>'message' FROM noetl.event WHERE event_key = 'end:first.1#1'"
    )
    assert reason == f"worker {WORKER} has given it back"

    for attempt in range(returned + 1, returned + COMMAND_ATTEMPTS_MAX):
        await desk.lease()
        await desk.lose(CommandId(f"first.1#{attempt}"))
    assert "execution.failed" not in await desk.types(execution_id)
    desk.states.drop([execution_id])
    await desk.lease()
    await desk.lose(CommandId(f"first.1#{returned + COMMAND_ATTEMPTS_MAX}"))

    assert (await desk.types(execution_id))[-1] == "execution.failed", "now it was lost five times"


async def test_what_a_stranger_says_from_outside_is_refused_and_audited(desk: Desk) -> None:
    execution_id = await desk.start(CHAIN)
    first, stranger = CommandId("first.1#1"), WorkerId("never-leased")
    before = await desk.types(execution_id)

    await desk.send(
        outside(claimed(execution_id, first, stranger)),
        outside(done(execution_id, first, {"go": False}, stranger)),
    )

    assert await desk.types(execution_id) == before, "it is pending, and stays so"
    audit = await desk.pool.fetch("SELECT actor, subject, action FROM noetl.audit")
    assert [tuple(row) for row in audit] == [(stranger, first, "completion.refused")]


async def test_what_the_holder_says_from_outside_counts(desk: Desk) -> None:
    execution_id = await desk.start(CHAIN)
    (leased,) = await desk.lease()

    await desk.send(
        outside(claimed(execution_id, leased.command_id)),
        outside(done(execution_id, leased.command_id, {"go": False})),
    )
    await desk.send(outside(done(execution_id, leased.command_id, {"go": False})))

    assert (await desk.types(execution_id))[-1] == "execution.completed"
    assert await desk.pool.fetchval("SELECT count(*) FROM noetl.audit") == 0


async def test_a_lost_command_cannot_be_ended_from_outside(desk: Desk) -> None:
    execution_id = await desk.start(CHAIN)
    await desk.pool.execute("DELETE FROM noetl.command")

    await desk.send(outside(done(execution_id, CommandId("first.1#1"), {"go": False})))

    assert "call.done" not in await desk.types(execution_id)


async def test_a_lease_that_postgres_lost_does_not_cost_our_worker_its_result(desk: Desk) -> None:
    execution_id = await desk.start(CHAIN)
    (leased,) = await desk.lease()
    await desk.pool.execute(
        "UPDATE noetl.command SET status = 'pending', worker_id = NULL, lease_until = NULL"
    )

    await desk.send(done(execution_id, leased.command_id, {"go": False}))

    assert (await desk.types(execution_id))[-1] == "execution.completed"


def outside(message: Claimed | Done) -> Claimed | Done:
    return msgspec.structs.replace(message, outside=True)


async def test_a_failed_loop_says_why_its_first_item_failed(desk: Desk) -> None:
    execution_id = await desk.start(LOOP)
    error = ToolError(kind="python_error", message="no luck")
    for one in await desk.lease():
        await desk.send(
            Failed(
                execution_id=execution_id,
                command_id=one.command_id,
                worker_id=WORKER,
                error=error,
            )
        )

    assert (await desk.types(execution_id))[-1] == "execution.failed"
    assert await _error(desk, execution_id) == "2 of 5 iterations failed; the first: no luck"


async def test_cancel_ends_the_execution_and_takes_its_commands_away(desk: Desk) -> None:
    execution_id = await desk.start(LOOP)
    leased = await desk.lease()
    await desk.send(Cancel(execution_id=execution_id, reason="enough"))
    await desk.send(done(execution_id, leased[0].command_id, 1))

    assert (await desk.types(execution_id))[-1] == "execution.cancelled"
    assert await desk.pool.fetchval("SELECT count(*) FROM noetl.command") == 0


async def test_a_letter_nobody_can_read_is_parked_and_the_rest_goes_on(desk: Desk) -> None:
    execution_id = await desk.start(CHAIN)
    (leased,) = await desk.lease()
    good = letter_of(done(execution_id, leased.command_id, {"go": False}))

    await desk.broker.advance([good._replace(body=b"\xc1 no msgpack"), good])

    assert (await desk.types(execution_id))[-1] == "execution.completed"
    assert await desk.pool.fetchval("SELECT count(*) FROM noetl.dead_letter") == 1


async def test_an_execution_whose_playbook_is_broken_fails_and_others_go_on(desk: Desk) -> None:
    good = await desk.start(CHAIN)
    broken = await desk.start("no: playbook")

    assert await desk.types(broken) == ["execution.started", "execution.failed"]
    await desk.run({"first": {"go": False}})
    assert (await desk.types(good))[-1] == "execution.completed"
    reason = await desk.pool.fetchval(
        "SELECT error->>'message' FROM noetl.event WHERE execution_id = $1 AND event_key = 'end'",
        broken,
    )
    assert "could not go on" in reason


async def test_a_report_the_database_cannot_store_ends_its_own_execution_only(desk: Desk) -> None:
    bad, good = await desk.start(CHAIN), await desk.start(CHAIN)
    leased = {one.execution_id: one.command_id for one in await desk.lease()}
    nowhere = Stored(tier="nowhere", size=1, sha256=b"", uri="nowhere/1")
    await desk.broker.advance(
        [
            letter_of(done(good, leased[good], {"go": False})),
            letter_of(
                Done(execution_id=bad, command_id=leased[bad], worker_id=WORKER, stored=nowhere)
            ),
        ]
    )

    assert (await desk.types(good))[-1] == "execution.completed"
    assert (await desk.types(bad))[-1] == "execution.failed"
    assert await desk.pool.fetchval("SELECT execution_id FROM noetl.dead_letter") == bad
    assert await desk.pool.fetchval("SELECT count(*) FROM noetl.command") == 0


async def test_an_execution_that_a_bad_report_has_ended_goes_on_when_it_is_retried(
    desk: Desk,
) -> None:
    execution_id = await desk.start(CHAIN)
    (leased,) = await desk.lease()
    nowhere = Stored(tier="nowhere", size=1, sha256=b"", uri="nowhere/1")
    await desk.send(
        Done(
            execution_id=execution_id,
            command_id=leased.command_id,
            worker_id=WORKER,
            stored=nowhere,
        )
    )
    assert (await desk.types(execution_id))[-1] == "execution.failed"

    await desk.send(Retry(execution_id=execution_id))
    await desk.run({"first": {"go": False}})

    assert (await desk.types(execution_id))[-1] == "execution.completed"


async def test_a_text_that_postgres_has_no_room_for_is_recorded_without_the_character(
    desk: Desk,
) -> None:
    bad = await desk.start(CHAIN)
    (leased,) = await desk.lease()
    # A NUL is legal in a Python text and in no text of Postgres.
    error = ToolError(kind="python_error", message="a\x00b")
    failed = Failed(execution_id=bad, command_id=leased.command_id, worker_id=WORKER, error=error)
    await desk.broker.advance([letter_of(failed)])

    assert (await desk.types(bad))[-1] == "execution.failed"
    recorded = "SELECT error->>'message' FROM noetl.event WHERE event_type = 'call.error'"
    assert await desk.pool.fetchval(recorded) == "a\ufffdb"
    assert await desk.pool.fetchval("SELECT count(*) FROM noetl.dead_letter") == 0


async def test_a_lost_command_row_is_found_and_issued_again(desk: Desk) -> None:
    execution_id = await desk.start(CHAIN)
    await desk.pool.execute("DELETE FROM noetl.command")
    await desk.send(Reconcile(execution_id=execution_id))

    (again,) = await desk.lease()
    assert again.command_id == "first.1#2"


async def test_the_result_is_stored_in_the_commit_that_refers_to_it(desk: Desk) -> None:
    execution_id = await desk.start(CHAIN)
    await desk.run({"first": {"go": False, "text": "ä"}})

    row = await desk.pool.fetchrow(
        "SELECT r.inline, e.result FROM noetl.event e "
        "JOIN noetl.result_ref r ON r.execution_id = e.execution_id AND r.ref_id = e.event_id "
        "WHERE e.event_type = 'call.done' AND e.execution_id = $1",
        execution_id,
    )
    assert row is not None
    assert row["inline"] == '{"go":false,"text":"ä"}'.encode()
    assert "ä" not in str(row["result"])


async def test_a_loop_over_the_results_of_another_sees_those_of_the_same_turn(desk: Desk) -> None:
    execution_id = await desk.start(LOOP_OVER_LOOP)
    first = await desk.lease()
    await desk.send(*[done(execution_id, one.command_id, f"r {one.command_id}") for one in first])

    elements = [decode_brief(one.payload).element for one in await desk.lease()]
    assert [e.value for e in elements if e is not None] == [
        "r each.1/0#1",
        "r each.1/1#1",
        "r each.1/2#1",
    ]


async def test_the_log_refuses_a_payload_in_a_result(desk: Desk) -> None:
    with pytest.raises(asyncpg.CheckViolationError):
        await desk.pool.execute(
            "INSERT INTO noetl.event (execution_id, event_id, event_key, shard_id, event_type, "
            "result) VALUES (1, 1, 'k', 0, 't', '{\"status\": \"ok\", \"data\": [1]}')"
        )


async def test_a_failing_guard_fails_the_step_by_name(desk: Desk) -> None:
    execution_id = await desk.start(CHAIN)
    await desk.run({"first": {"other": 1}})

    assert (await desk.types(execution_id))[-2:] == ["step.failed", "execution.failed"]
    message = await _error(desk, execution_id)
    assert "first" in message
    assert "next.arcs[0].when" in message


async def _error(desk: Desk, execution_id: ExecutionId) -> str:
    return str(
        await desk.pool.fetchval(
            "SELECT error->>'message' FROM noetl.event "
            "WHERE execution_id = $1 AND event_key = 'end'",
            execution_id,
        )
    )


async def test_who_reports_a_command_has_claimed_it_even_if_that_word_comes_late(
    desk: Desk,
) -> None:
    execution_id = await desk.start(CHAIN)
    (leased,) = await desk.lease()

    await desk.send(done(execution_id, leased.command_id, {"go": False}))
    await desk.send(claimed(execution_id, leased.command_id))

    types = await desk.types(execution_id)
    assert types[-4:] == ["command.claimed", "call.done", "step.exit", "execution.completed"]
    assert types.count("command.claimed") == 1
