"""Whatever an execution waits for, it says so: a sentence after every event but the last."""

from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from noetl_core.domain.fold import fold
from noetl_core.domain.ids import CatalogId, CommandId, ExecutionId
from noetl_core.domain.progress import waiting_on
from noetl_core.domain.state import ExecutionState
from noetl_core.domain.waiting import OpenGroup, waits_for
from noetl_core.wire.messages import ChildEnded, Pause, Resume
from support.running import EXECUTION, Run, arc, loop_over, playbook, step

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def chain() -> Run:
    run = Run(playbook(step("a", "b"), step("b")))
    run.expire("a.1#1")
    run.done("a.1#2", "b.1#1")
    return run


def join() -> Run:
    run = Run(
        playbook(
            step("s", "a", "b", inclusive=True, router=True),
            step("a", "j"),
            step("b", "j"),
            step("j"),
        )
    )
    run.done("a.1#1", "b.1#1", "j.1#1")
    return run


def loop() -> Run:
    run = Run(playbook(step("a", "b", loop=loop_over([1, 2, 3])), step("b")))
    run.done("a.1/0#1", "a.1/1#1", "a.1/2#1", "b.1#1")
    return run


def wait() -> Run:
    run = Run(playbook(step("a", "b", kind="wait"), step("b")))
    run.park("a.1#1", "wait", until_ms=5)
    run.due("wait:a.1#1")
    run.done("b.1#1")
    return run


def signal() -> Run:
    run = Run(playbook(step("a", kind="wait")))
    run.park("a.1#1", "wait", signal="go")
    run.signal("go", 1)
    return run


def approval() -> Run:
    run = Run(playbook(step("a", arc("b")), step("b", kind="approval")))
    run.done("a.1#1")
    run.park("b.1#1", "approval", signal="b")
    run.signal("b", 1)
    return run


def child() -> Run:
    run = Run(playbook(step("a", kind="playbook")))
    run.park("a.1#1", "playbook", catalog_id=CatalogId(7), path="p")
    parked = run.state.commands[CommandId("a.1#1")].parked
    assert parked is not None
    assert parked.child is not None
    run.take(
        ChildEnded(
            execution_id=EXECUTION,
            command_id=CommandId("a.1#1"),
            child_id=parked.child,
            status="COMPLETED",
        )
    )
    return run


def pause() -> Run:
    run = Run(playbook(step("a", "b"), step("b")))
    run.take(Pause(execution_id=EXECUTION))
    run.done("a.1#1")
    run.take(Resume(execution_id=EXECUTION))
    run.done("b.1#1")
    return run


def retry() -> Run:
    run = Run(playbook(step("a")))
    run.fail("a.1#1")
    run.retry()
    run.done("a.2#1")
    return run


@pytest.mark.parametrize(
    "life",
    [chain, join, loop, wait, signal, approval, child, pause, retry],
    ids=lambda f: f.__name__,
)
def test_there_is_a_sentence_after_every_event_until_it_has_ended(life: Callable[[], Run]) -> None:
    run = life()
    state = ExecutionState(execution_id=ExecutionId(EXECUTION))
    assert waiting_on(state)
    for event in run.events:
        state = fold(state, event)
        assert bool(waiting_on(state)) != state.is_terminal, event
    assert state.is_terminal


@pytest.mark.parametrize(
    ("group", "sentence"),
    [
        (OpenGroup("a", "cpu", 2, "running"), "2 commands of step `a` are running"),
        (
            OpenGroup("a", "cpu", 1, "silent"),
            (
                "1 command of step `a` was lost with a worker that fell silent; "
                "the broker tries again, unless that has happened too often"
            ),
        ),
        (
            OpenGroup("a", "cpu", 1, "delayed", attempt=2, next_at=NOON),
            "1 command of step `a` will be tried again (attempt 2) at 2026-01-01T12:00:00Z",
        ),
        (
            OpenGroup("a", "cpu", 1, "held"),
            "1 command of step `a` is held back until it is resumed",
        ),
        (
            OpenGroup("a", "x", 1, "ready", ("tool:python",)),
            "1 command of step `a` waits for a free worker of pool `x` that has the tool `python`",
        ),
        (
            OpenGroup("a", "gpu", 1, "alone"),
            "1 command of step `a` waits for a worker of pool `gpu`, and none is online",
        ),
        (
            OpenGroup("a", "cpu", 1, "elsewhere"),
            (
                "1 command of step `a` waits for a worker of pool `cpu`: "
                "workers of another system are registered for it, none of ours is online"
            ),
        ),
        (
            OpenGroup("a", "cpu", 1, "meant", next_at=NOON, target="w7"),
            (
                "1 command of step `a` is meant for worker `w7` until 2026-01-01T12:00:00Z; "
                "then any of pool `cpu` may take it"
            ),
        ),
    ],
    ids=lambda value: value.situation if isinstance(value, OpenGroup) else "",
)
def test_every_situation_of_a_command_has_its_sentence(group: OpenGroup, sentence: str) -> None:
    assert waits_for("whatever", [group]) == sentence
