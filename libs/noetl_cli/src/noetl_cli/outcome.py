"""How a run ended: the answer of `noetl run --json`, and its exit code."""

from dataclasses import dataclass, field
from typing import Any

from noetl_cli.failure import EXIT_FAILED, EXIT_TIMEOUT
from noetl_core.wire.http import ExecutionView, StepView


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    view: ExecutionView
    steps: dict[str, StepView] = field(default_factory=dict)
    url: str = ""
    is_ephemeral: bool = False
    is_timeout: bool = False

    @property
    def exit_code(self) -> int:
        if self.is_timeout:
            return EXIT_TIMEOUT
        return 0 if self.view.status == "COMPLETED" else EXIT_FAILED

    def as_json(self) -> dict[str, Any]:
        return {
            "execution_id": self.view.execution_id,
            "status": self.view.status,
            "duration_s": duration_seconds(self.view),
            "error": self.view.error,
            "steps": {
                name: {"status": step.status, "result": step.result}
                for name, step in self.steps.items()
            },
        }


def duration_seconds(view: ExecutionView) -> float:
    """From its first event to its last (so far)."""
    end = view.ended_at or view.updated_at
    return round((end - view.started_at).total_seconds(), 3)
