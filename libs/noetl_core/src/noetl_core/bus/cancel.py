"""Cancelling tasks that talk to NATS: once is not always enough.

`asyncio.wait_for` of Python 3.11 returns the answer, and drops the cancellation, when both come in
the same turn of the loop, and nats-py catches CancelledError while it flushes. A task with a loop
around such a call would go on for ever.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_SECONDS = 0.5


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel until they are over. What they raise meanwhile is dropped."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        done, left = await asyncio.wait(left, timeout=_AGAIN_SECONDS)
        for task in done:
            if not task.cancelled():
                task.exception()
