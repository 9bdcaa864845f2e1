"""Timers: what must happen at a moment although nobody does anything. Rows of noetl.timer.

execution         the whole execution is out of time
execution:2       the same, since it was retried for the second time
step:load.2       a visit of a step is
wait:load.2#1     a parked command has waited long enough
"""

from typing import NamedTuple

from noetl_core.domain.ids import CommandId, VisitId, visit_id
from noetl_core.domain.playbook import Step
from noetl_core.domain.tools import PARKED_KINDS

_STEP = "step:"
_WAIT = "wait:"


class Timer(NamedTuple):
    visit_id: VisitId | None = None
    command_id: CommandId | None = None


def execution_timer(generation: int) -> str:
    """A retry has a time of its own: what is said of the time before must not end it."""
    return f"execution:{generation}" if generation else "execution"


def step_timer(step: str, visit: int) -> str:
    return f"{_STEP}{visit_id(step, visit)}"


def wait_timer(command_id: CommandId) -> str:
    return f"{_WAIT}{command_id}"


def parse_timer(timer: str) -> Timer:
    """Of a step or of a wait."""
    if timer.startswith(_STEP):
        return Timer(visit_id=VisitId(timer.removeprefix(_STEP)))
    return Timer(command_id=CommandId(timer.removeprefix(_WAIT)))


def is_timed_by_broker(step: Step) -> bool:
    """Whether a worker alone cannot keep the step's timeout: it has more than one command, or one
    that waits without a worker."""
    if step.spec.timeout_s is None:
        return False
    is_repeated = step.retry.on_error is not None or step.retry.on_success is not None
    waits = any(task.kind in PARKED_KINDS for task in step.tool)
    return step.loop is not None or is_repeated or waits
