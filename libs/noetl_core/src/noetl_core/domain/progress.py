"""What a client sees of a running execution: how far each step is, and what the whole waits for.

Both are functions of the state alone, and neither depends on the order of its dictionaries: a state
that came back from the database (jsonb sorts keys) must give the same bytes as one that never left.
"""

import shlex
from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec

from noetl_core.domain.ids import ExecutionId, StepName
from noetl_core.domain.state import (
    ExecutionState,
    OpenCommand,
    Parked,
    StepState,
    StepStatus,
)

STEPS_NAMED_MAX = 3
"""A sentence names this many steps; the rest is a number."""

BESIDES = "; besides, "
"""Comes before what is parked while commands are open: what the queue knows better of those
(domain/waiting.py) takes the place of the part before it."""

_LAST_MS = int(datetime.max.replace(tzinfo=UTC, microsecond=0).timestamp()) * 1000


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
    if state.status == "PAUSED":
        rest = f"; {_commands(held)} still {_verb(held, 'runs', 'run')}" if held else ""
        return f"paused; resume it with `noetl resume {state.execution_id}`{rest}"
    parked = _parked(state)
    besides = f"{BESIDES}{parked}" if parked else ""
    if held:
        return f"{_commands(held)} {_verb(held, 'is', 'are')} running{besides}"
    if free:
        return f"{_commands(free)} {_verb(free, 'waits', 'wait')} for a worker{besides}"
    if parked:
        return parked
    if state.arrivals and not state.visits:
        return f"{_steps(state.arrivals)}: waiting for the broker to enter"
    if state.arrivals:
        return f"{_steps(state.arrivals)}: waiting for the other branches to arrive"
    return "waiting for the broker to go on"


def waits_for(state: ExecutionState) -> list[ExecutionId] | None:
    """The child executions without whose end nothing moves; none: it waits for a person, a signal
    or a moment. None where something should be under way, or need not any more.
    """
    commands = state.commands.values()
    if state.is_terminal or not commands or any(c.parked is None for c in commands):
        return None
    children = (c.parked.child for c in commands if c.parked is not None)
    return sorted({child for child in children if child is not None})


def _commands_by_step(state: ExecutionState) -> tuple[dict[StepName, int], dict[StepName, int]]:
    """How many commands of each step a worker holds, and how many wait for one."""
    held: dict[StepName, int] = {}
    free: dict[StepName, int] = {}
    for command in state.commands.values():
        if command.parked is None:
            counts = free if command.worker_id is None else held
            counts[command.step] = counts.get(command.step, 0) + 1
    return held, free


def _parked(state: ExecutionState) -> str | None:
    """What the commands wait for that hold no worker meanwhile: the first one, and how many."""
    waits = sorted(
        ((c, c.parked) for c in state.commands.values() if c.parked is not None),
        key=lambda wait: (wait[0].step, wait[0].visit, wait[0].index or 0),
    )
    if not waits:
        return None
    more = len(waits) - 1
    rest = f", and {more} more {'command waits' if more == 1 else 'commands wait'}" if more else ""
    return f"{_wait(state, *waits[0])}{rest}"


def _wait(state: ExecutionState, command: OpenCommand, parked: Parked) -> str:
    step = f"step `{command.step}`"
    end = "" if parked.until_ms is None else f" until {_moment(parked.until_ms)}"
    match parked:
        case Parked(kind="playbook"):
            return f"{step} waits for the child execution {parked.child}{end}"
        case Parked(kind="approval"):
            by = f" by {' or '.join(parked.approvers)}" if parked.approvers else ""
            who = f" --by {shlex.quote(parked.approvers[0])}" if parked.approvers else ""
            how = f"`noetl approve {state.execution_id} {parked.signal}{who}`"
            return f"{step} waits for an approval{by}{end}; give it with {how}"
        case Parked(signal=""):
            return f"{step} waits{end}"
        case _:
            return f"{step} waits for the signal `{parked.signal}`{end}"


def _moment(unix_ms: int) -> str:
    # A calendar ends; a wait that somebody computed may not, and must not stop the projection.
    moment = datetime.fromtimestamp(min(max(unix_ms, 0), _LAST_MS) / 1000, UTC)
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


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
