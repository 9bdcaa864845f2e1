"""Runs the coroutine of a command. SIGINT, SIGTERM and SIGHUP cancel it, so that it cleans up."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from noetl_cli.failure import Interrupted

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_until_signal(main: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(_cancelled_by_signals(main))


async def _cancelled_by_signals(main: Coroutine[Any, Any, T]) -> T:
    received: list[int] = []
    task = asyncio.ensure_future(main)

    def cancel(number: int) -> None:
        received.append(number)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, cancel, number)
    try:
        return await task
    except asyncio.CancelledError:
        if received:
            raise Interrupted(received[0]) from None
        raise
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
