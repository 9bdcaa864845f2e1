"""What `noetl run` and `noetl status` say about an execution to a person."""

from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from noetl_cli.outcome import RunOutcome, duration_seconds
from noetl_cli.progress import counts_of, steps_of
from noetl_core.domain.progress import StepProgress
from noetl_core.wire.http import ExecutionView, StepView

_RESULT_CHARACTERS = 200
_STYLES = {
    "COMPLETED": "green",
    "FAILED": "red",
    "CANCELLED": "yellow",
    "RUNNING": "cyan",
    "PAUSED": "yellow",
    "SKIPPED": "dim",
}


def print_outcome(console: Console, outcome: RunOutcome) -> None:
    view = outcome.view
    console.print(status_text(view), soft_wrap=True)
    if view.error:
        console.print(Text(f"  {error_sentence(view.error)}", style="red"), soft_wrap=True)
    console.print(step_table(outcome.steps, steps_of(view)))
    console.print(Text(_where_to_look(outcome), style="dim"), soft_wrap=True)


def status_text(view: ExecutionView) -> Text:
    seconds = duration_seconds(view)
    return Text.assemble(
        (view.status, _STYLES.get(view.status, "")),
        f" {view.path} version {view.version}, {seconds:.2f} s, execution {view.execution_id}",
    )


def error_sentence(error: dict[str, Any]) -> str:
    step = f"step {error['step']}: " if error.get("step") else ""
    return f"{step}{error.get('message') or error} ({error.get('kind', 'error')})"


def step_table(steps: dict[str, StepView], progress: dict[str, StepProgress]) -> Table:
    """A line a step: its name, status, how many items of a loop are done, and what came out."""
    table = Table.grid(padding=(0, 2))
    for name, step in steps.items():
        shown = _shown(step)
        counts = counts_of(progress[name]) if name in progress else ""
        status = Text(step.status, style=_STYLES.get(step.status, ""))
        table.add_row(Text(f"  {name}"), status, Text(counts), Text(shown, overflow="fold"))
    return table


def _shown(step: StepView) -> str:
    if step.error:
        return error_sentence(step.error)
    return "" if step.status == "RUNNING" else shortened(step.result)


def shortened(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    if len(text) <= _RESULT_CHARACTERS:
        return text
    items = f"{len(value)} items, " if isinstance(value, list) else ""
    return f"{text[:_RESULT_CHARACTERS]}… ({items}{len(text)} characters)"


def _where_to_look(outcome: RunOutcome) -> str:
    execution_id = outcome.view.execution_id
    if outcome.is_ephemeral:
        return (
            "It ran on a temporary NoETL, gone now. To keep executions: noetl dev, then run again."
        )
    return f"More: noetl events {execution_id} · {outcome.url}/api/executions/{execution_id}"
