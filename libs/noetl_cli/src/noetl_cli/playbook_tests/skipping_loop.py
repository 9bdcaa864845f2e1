"""An event loop in which nobody waits: where it would sleep, its clock moves on instead."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Skipping(selectors.DefaultSelector):
    """Asked to wait for input for some time, it says at once that the time is over."""

    skipped_seconds = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is not None and timeout > 0:
            ready = super().select(0)
            if not ready:
                self.skipped_seconds += timeout
            return ready
        return super().select(timeout)


class _SkippingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return super().time() + self._skipping.skipped_seconds


def run_without_waiting(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=_SkippingLoop) as runner:
        return runner.run(main)
