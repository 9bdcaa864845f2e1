"""accept: what a message becomes, or that nothing follows from it."""

from typing import Any

from noetl_broker.accept import COMMAND_ATTEMPTS_MAX, accept, checkpoint, expire
from noetl_core.domain.errors import ToolError
from noetl_core.domain.events import (
    CallDone,
    CallFailed,
    CommandClaimed,
    CommandExpired,
    ExecutionCancelled,
)
from noetl_core.domain.ids import (
    CommandId,
    EpochId,
    EventId,
    ExecutionId,
    StepName,
    VisitId,
    WorkerId,
)
from noetl_core.domain.state import ExecutionState, OpenCommand, Visit
from noetl_core.wire.messages import Cancel, Claimed, Done, Expired, Failed

EXECUTION, COMMAND, NEXT_ID = ExecutionId(1), CommandId("a.1#1"), EventId(9)


def running(**command: Any) -> ExecutionState:
    """An execution with one command open."""
    return ExecutionState(
        execution_id=EXECUTION,
        status="RUNNING",
        visits={VisitId("a.1"): Visit(step=StepName("a"), visit=1)},
        commands={COMMAND: OpenCommand(step=StepName("a"), visit=1, **command)},
    )


def done(**fields: Any) -> CallDone | None:
    message = Done(execution_id=EXECUTION, command_id=COMMAND, worker_id=WorkerId("w1"), **fields)
    fact = accept(running(), message, NEXT_ID)
    assert fact is None or isinstance(fact, CallDone)
    return fact


def test_a_report_of_a_command_that_is_not_open_is_nothing() -> None:
    late = Done(execution_id=EXECUTION, command_id=CommandId("a.1#7"), worker_id=WorkerId("w1"))

    assert accept(running(), late, NEXT_ID) is None


def test_the_first_claim_counts() -> None:
    claim = Claimed(execution_id=EXECUTION, command_id=COMMAND, worker_id=WorkerId("w1"))

    assert isinstance(accept(running(), claim, NEXT_ID), CommandClaimed)
    assert accept(running(worker_id=WorkerId("w2")), claim, NEXT_ID) is None


def test_what_tasks_set_is_the_same_in_any_order_of_the_keys() -> None:
    fact = done(ctx={"seen.by": 1, "seen": {"all": 2}})

    assert fact is not None
    assert fact.ctx == {"seen": {"all": 2}}


def test_values_for_routing_that_the_log_would_refuse_stay_behind_the_reference() -> None:
    small, large = done(context={"n": 1}), done(context={"n": "x" * 10_000})

    assert small is not None
    assert small.result.context == {"n": 1}
    assert large is not None
    assert large.result.context == {}


def test_texts_are_recorded_without_the_character_that_postgres_refuses() -> None:
    failed = Failed(
        execution_id=EXECUTION,
        command_id=COMMAND,
        worker_id=WorkerId("w1"),
        error=ToolError(kind="python_error", message="a\0b", details={"line": "\0"}),
    )
    fact = accept(running(), failed, NEXT_ID)
    cancelled = accept(running(), Cancel(execution_id=EXECUTION, reason="\0"), NEXT_ID)

    assert isinstance(fact, CallFailed)
    assert (fact.error.message, fact.error.details) == ("a\ufffdb", {"line": "\ufffd"})
    assert isinstance(cancelled, ExecutionCancelled)
    assert cancelled.reason == "\ufffd"


def test_an_execution_that_is_not_running_is_not_cancelled() -> None:
    for status in ("PENDING", "COMPLETED", "FAILED", "CANCELLED"):
        state = ExecutionState(execution_id=EXECUTION, status=status)
        assert accept(state, Cancel(execution_id=EXECUTION), NEXT_ID) is None


def test_the_last_attempt_is_lost_for_good() -> None:
    lost = [expire(running(attempt=n), COMMAND, "gone") for n in (1, COMMAND_ATTEMPTS_MAX)]

    assert [fact is not None and fact.again is None for fact in lost] == [False, True]


def test_how_often_a_command_may_be_lost_can_be_set() -> None:
    message = Expired(execution_id=EXECUTION, command_id=COMMAND, reason="gone")

    fact = accept(running(attempt=2), message, NEXT_ID, attempts_max=2)

    assert isinstance(fact, CommandExpired)
    assert fact.again is None


def test_an_epoch_is_closed_once_and_only_while_the_execution_runs() -> None:
    state = running()
    state.epoch = EpochId(4)

    assert checkpoint(state, EpochId(4)) is None
    assert checkpoint(state, EpochId(5)) is not None
    state.status = "COMPLETED"
    assert checkpoint(state, EpochId(5)) is None
