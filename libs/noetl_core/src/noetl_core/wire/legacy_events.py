"""What older servers and workers called the events, and what the same fact is called here.

Old names came with underscores or dots, in any case: `action_completed`, `Command.Completed`. They
are understood where events come in from outside; nothing inside ever sees one.
"""

from noetl_core.domain.events import FACT_BY_TYPE

OLD_NAMES: dict[str, tuple[str, ...]] = {
    "execution.started": (
        *("execution_start", "playbook_started", "playbook_initialized"),
        *("workflow_started", "workflow_initialized"),
    ),
    "execution.completed": ("execution_complete", "playbook_completed", "workflow_completed"),
    "execution.failed": ("execution_error", "playbook_failed", "workflow_failed"),
    "execution.cancelled": ("execution_canceled", "playbook_cancelled", "workflow_cancelled"),
    "step.enter": ("step_started", "step_start", "step_entered"),
    "step.exit": ("step_completed", "step_complete", "step_exited", "step_result"),
    "step.failed": ("step_error",),
    "command.issued": ("loop_iteration", "command_created", "retry_scheduled"),
    "command.claimed": (
        *("action_started", "task_started", "task_start", "command_started"),
        "iteration_started",
    ),
    "call.done": (
        *("action_completed", "action_complete", "task_completed", "task_complete", "result"),
        *("command_completed", "iteration_completed", "loop_item"),
    ),
    "call.error": (
        *("action_failed", "action_error", "task_failed", "task_error", "call_failed"),
        *("command_failed", "iteration_failed"),
    ),
    "loop.started": ("iterator_started",),
    "loop.done": ("iterator_completed", "iterator_failed", "loop_completed", "loop_failed"),
    "retry.completed": ("retry_sequence_completed",),
}
"""Old names by the current one. A loop that failed is done too: its status says how."""


def _spelled(name: str) -> str:
    return name.strip().lower().replace("_", ".")


_CURRENT = {_spelled(old): current for current, names in OLD_NAMES.items() for old in names}


def current_name(old: str) -> str | None:
    """The name of the same event here, or None for one that nobody knows."""
    spelled = _spelled(old)
    return spelled if spelled in FACT_BY_TYPE else _CURRENT.get(spelled)
