"""How far an execution is and what it waits for, as functions of its state."""

import msgspec
import pytest

from noetl_core.domain.ids import CommandId, ExecutionId, LoopId, StepName, VisitId, WorkerId
from noetl_core.domain.progress import StepProgress, progress, waiting_on, waits_for
from noetl_core.domain.state import (
    ExecutionState,
    ExecutionStatus,
    LoopState,
    OpenCommand,
    Parked,
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


def parked(step: str, wait: Parked, index: int | None = None) -> dict[CommandId, OpenCommand]:
    command = OpenCommand(
        step=StepName(step), visit=1, index=index, worker_id=WorkerId("w"), parked=wait
    )
    return {CommandId(f"{step}.1/{index}#1"): command}


NOON_MS = 1_767_268_800_000


@pytest.mark.parametrize(
    ("wait", "sentence"),
    [
        (
            Parked(kind="playbook", child=ExecutionId(77)),
            "step `hold` waits for the child execution 77",
        ),
        (Parked(kind="wait", until_ms=NOON_MS), "step `hold` waits until 2026-01-01T12:00:00Z"),
        (
            Parked(kind="wait", signal="go", until_ms=NOON_MS),
            "step `hold` waits for the signal `go` until 2026-01-01T12:00:00Z",
        ),
        (
            Parked(kind="approval", signal="hold"),
            "step `hold` waits for an approval; give it with `noetl approve 1 hold`",
        ),
        (
            Parked(kind="approval", signal="hold", approvers=("ada", "bob")),
            (
                "step `hold` waits for an approval by ada or bob; "
                "give it with `noetl approve 1 hold --by ada`"
            ),
        ),
        (Parked(kind="wait", until_ms=2**62), "step `hold` waits until 9999-12-31T23:59:59Z"),
    ],
)
def test_a_parked_command_says_what_it_waits_for(wait: Parked, sentence: str) -> None:
    assert waiting_on(running(commands=parked("hold", wait))) == sentence


def test_of_many_that_wait_the_first_is_named() -> None:
    held = {
        id_: command
        for child in (3, 1, 2)
        for id_, command in parked(
            "call", Parked(kind="playbook", child=ExecutionId(child)), index=child
        ).items()
    }

    assert waiting_on(running(commands=held)) == (
        "step `call` waits for the child execution 1, and 2 more commands wait"
    )


def test_what_runs_is_said_before_what_waits() -> None:
    wait = parked("hold", Parked(kind="wait", signal="go"))

    assert waiting_on(running(commands={**wait, **commands(("fetch", "w1"))})) == (
        "1 command of step `fetch` is running; besides, step `hold` waits for the signal `go`"
    )
    assert waiting_on(running(commands={**wait, **commands(("fetch", None))})) == (
        "1 command of step `fetch` waits for a worker"
        "; besides, step `hold` waits for the signal `go`"
    )


def test_a_paused_execution_says_how_it_goes_on_and_what_still_runs() -> None:
    state = ExecutionState(execution_id=ExecutionId(9), status="PAUSED")
    assert waiting_on(state) == "paused; resume it with `noetl resume 9`"

    state.commands = commands(("fetch", "w1"), ("fetch", None))
    assert waiting_on(state) == (
        "paused; resume it with `noetl resume 9`; 1 command of step `fetch` still runs"
    )


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


def test_it_waits_for_children_when_every_command_is_parked_and_for_nobody_else() -> None:
    approval = parked("hold", Parked(kind="approval", signal="hold"))
    child = parked("call", Parked(kind="playbook", child=ExecutionId(7)))

    assert waits_for(running(commands=approval)) == []
    assert waits_for(running(commands=child | approval)) == [7]
    assert waits_for(running(commands=child | commands(("load", None)))) is None
    assert waits_for(running()) is None
