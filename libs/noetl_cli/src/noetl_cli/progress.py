"""Shows how far an execution is, on stderr: live bars in a terminal, plain lines anywhere else."""

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from noetl_core.domain.progress import StepProgress
from noetl_core.wire.http import ExecutionView

_PLAIN_SECONDS = 2.0
"""A loop that goes on is mentioned this often in plain output."""

_BAR_WIDTH = 32
_ROWS_MAX = 30


class Display(Protocol):
    def show(self, view: ExecutionView) -> None: ...


@contextlib.contextmanager
def open_display(console: Console) -> Iterator[Display]:
    if not console.is_terminal:
        yield PlainDisplay(console)
        return
    display = LiveDisplay()
    with Live(console=console, get_renderable=display.table, refresh_per_second=12):
        yield display


class LiveDisplay:
    """One line a step; a step that loops has a bar. Of very many steps, the latest."""

    def __init__(self) -> None:
        self._steps: dict[str, StepProgress] = {}
        self._spinner = Spinner("dots", style="cyan")

    def show(self, view: ExecutionView) -> None:
        # In the order in which they were first seen: the projection's own order is by name.
        self._steps |= steps_of(view)

    def table(self) -> Table:
        table = Table.grid(padding=(0, 1))
        for name, step in list(self._steps.items())[-_ROWS_MAX:]:
            table.add_row(self._mark(step), Text(name), _bar(step), Text(counts_of(step)))
        return table

    def _mark(self, step: StepProgress) -> RenderableType:
        match step.status:
            case "COMPLETED":
                return Text("✓", style="green")
            case "FAILED":
                return Text("✗", style="red")
            case "SKIPPED" | "CANCELLED":
                return Text("-", style="dim")
            case _:
                return self._spinner


class PlainDisplay:
    """One line when a step changes its status, and now and then for a loop that goes on."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: dict[str, StepProgress] = {}
        self._shown_at: dict[str, float] = {}

    def show(self, view: ExecutionView) -> None:
        for name, step in steps_of(view).items():
            if self._is_news(name, step):
                self._shown[name] = step
                self._shown_at[name] = time.monotonic()
                line = f"{name}: {step.status.lower()} {counts_of(step)}".rstrip()
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _is_news(self, name: str, step: StepProgress) -> bool:
        before = self._shown.get(name)
        if before is None or (before.status, before.visits) != (step.status, step.visits):
            return True
        return before != step and time.monotonic() - self._shown_at[name] >= _PLAIN_SECONDS


def steps_of(view: ExecutionView) -> dict[str, StepProgress]:
    return msgspec.convert(view.progress, dict[str, StepProgress])


def _bar(step: StepProgress) -> RenderableType:
    if step.total is None:
        return Text()
    return ProgressBar(
        total=max(step.total, 1),
        completed=step.done + step.failed if step.total else 1,
        width=_BAR_WIDTH,
    )


def counts_of(step: StepProgress) -> str:
    if step.total is None:
        return f"visit {step.visits}" if step.visits > 1 else ""
    failed = f", {step.failed} failed" if step.failed else ""
    return f"{step.done}/{step.total}{failed}"
