"""How far an execution is and what it waits for, as functions of its state."""

import msgspec
import pytest

from noetl_core.domain.ids import CommandId, ExecutionId, LoopId, StepName, VisitId, WorkerId
from noetl_core.domain.progress import StepProgress, progress, waiting_on
from noetl_core.domain.state import (
    ExecutionState,
    ExecutionStatus,
    LoopState,
    OpenCommand,
    StepState,
    Visit,
)


def running(**fields: object) -> ExecutionState:
    return ExecutionState(execution_id=ExecutionId(1), status="RUNNING", **fields)  # type: ignore[arg-type]


def commands(*steps: tuple[str, str | None]) -> dict[CommandId, OpenCommand]:
    return {
        CommandId(f"{step}.1/{i}#1"): OpenCommand(
            step=StepName(step), visit=1, index=i, worker_id=WorkerId(worker) if worker else None
        )
        for i, (step, worker) in enumerate(steps)
    }


def test_progress_has_the_counts_of_each_step() -> None:
    state = running(
        steps={
            StepName("load"): StepState(visit=2, status="COMPLETED"),
            StepName("fetch"): StepState(visit=1, total=10, done=4, failed=1),
        }
    )

    assert progress(state) == {
        "load": StepProgress(status="COMPLETED", visits=2, total=None, done=0, failed=0),
        "fetch": StepProgress(status="RUNNING", visits=1, total=10, done=4, failed=1),
    }


@pytest.mark.parametrize("status", ["COMPLETED", "FAILED", "CANCELLED"])
def test_an_ended_execution_waits_for_nothing(status: ExecutionStatus) -> None:
    assert waiting_on(ExecutionState(execution_id=ExecutionId(1), status=status)) is None


def test_an_accepted_request_waits_for_the_broker() -> None:
    assert waiting_on(ExecutionState(execution_id=ExecutionId(1))) is not None


def test_commands_that_a_worker_holds_are_running() -> None:
    state = running(commands=commands(("fetch", "w1"), ("fetch", "w2"), ("fetch", None)))

    assert waiting_on(state) == "2 commands of step `fetch` are running"


def test_commands_that_nobody_holds_wait_for_a_worker() -> None:
    assert (
        waiting_on(running(commands=commands(("fetch", None), ("load", None))))
        == "2 commands of steps `fetch`, `load` wait for a worker"
    )
    assert (
        waiting_on(running(commands=commands(("fetch", None))))
        == "1 command of step `fetch` waits for a worker"
    )


def test_a_sentence_names_only_a_few_steps() -> None:
    state = running(commands=commands(*((f"s{i}", "w") for i in range(9))))

    assert waiting_on(state) == "9 commands of steps `s0`, `s1`, `s2` and 6 more are running"


def test_tokens_at_a_barrier_wait_for_the_other_branches() -> None:
    state = running(
        arrivals={StepName("join"): 1},
        visits={VisitId("slow.1"): Visit(step=StepName("slow"), visit=1)},
    )

    assert waiting_on(state) == "step `join`: waiting for the other branches to arrive"


def test_a_state_that_went_through_jsonb_says_the_same() -> None:
    """jsonb sorts keys, so the order of a dictionary must not show."""
    state = running(
        commands=commands(("zeta", "w"), ("alpha", "w"), ("mid", "w"), ("beta", "w")),
        steps={StepName(n): StepState(visit=1) for n in ("zeta", "alpha")},
        visits={
            VisitId("zeta.1"): Visit(
                step=StepName("zeta"),
                visit=1,
                loop=LoopState(loop_id=LoopId(3), total=3, part_size=3, parts=1, max_in_flight=2),
            )
        },
    )
    document = msgspec.json.decode(msgspec.json.encode(state))
    document["commands"] = dict(sorted(document["commands"].items()))
    document["steps"] = dict(sorted(document["steps"].items()))
    again = msgspec.convert(document, ExecutionState)

    assert waiting_on(again) == waiting_on(state)
    assert progress(again) == progress(state)
