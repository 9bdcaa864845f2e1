"""What a client sees of a running execution: how far each step is, and what the whole waits for.

Both are functions of the state alone, and neither depends on the order of its dictionaries: a state
that came back from the database (jsonb sorts keys) must give the same bytes as one that never left.
"""

from collections.abc import Iterable

import msgspec

from noetl_core.domain.ids import StepName
from noetl_core.domain.state import ExecutionState, StepState, StepStatus

STEPS_NAMED_MAX = 3
"""A sentence names this many steps; the rest is a number."""


class StepProgress(msgspec.Struct, frozen=True, kw_only=True):
    """`total` is the number of items of a loop's latest activation; None for a plain step."""

    status: StepStatus
    visits: int
    total: int | None
    done: int
    failed: int


def progress(state: ExecutionState) -> dict[StepName, StepProgress]:
    return {name: _progress_of(step) for name, step in state.steps.items()}


def _progress_of(step: StepState) -> StepProgress:
    return StepProgress(
        status=step.status,
        visits=step.visit,
        total=step.total,
        done=step.done,
        failed=step.failed,
    )


def waiting_on(state: ExecutionState) -> str | None:
    """One sentence for a person: what has to happen next. None when nothing has to any more."""
    if state.is_terminal:
        return None
    if state.status == "PENDING":
        return "waiting for the broker to start it"
    held, free = _commands_by_step(state)
    if held:
        return f"{_commands(held)} {_verb(held, 'is', 'are')} running"
    if free:
        return f"{_commands(free)} {_verb(free, 'waits', 'wait')} for a worker"
    if state.arrivals and not state.visits:
        return f"{_steps(state.arrivals)}: waiting for the broker to enter"
    if state.arrivals:
        return f"{_steps(state.arrivals)}: waiting for the other branches to arrive"
    return "waiting for the broker to go on"


def _commands_by_step(state: ExecutionState) -> tuple[dict[StepName, int], dict[StepName, int]]:
    """How many commands of each step a worker holds, and how many nobody does."""
    held: dict[StepName, int] = {}
    free: dict[StepName, int] = {}
    for command in state.commands.values():
        counts = free if command.worker_id is None else held
        counts[command.step] = counts.get(command.step, 0) + 1
    return held, free


def _commands(by_step: dict[StepName, int]) -> str:
    count = sum(by_step.values())
    return f"{count} {'command' if count == 1 else 'commands'} of {_steps(by_step)}"


def _verb(by_step: dict[StepName, int], one: str, many: str) -> str:
    return one if sum(by_step.values()) == 1 else many


def _steps(names: Iterable[StepName]) -> str:
    ordered = sorted(names)
    named = ", ".join(f"`{name}`" for name in ordered[:STEPS_NAMED_MAX])
    more = len(ordered) - STEPS_NAMED_MAX
    label = "step" if len(ordered) == 1 else "steps"
    return f"{label} {named}" if more <= 0 else f"{label} {named} and {more} more"
