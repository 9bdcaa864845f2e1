"""bus/cancel.py: a task that drops one cancellation is cancelled again."""

import asyncio
from contextlib import suppress

from noetl_core.bus.cancel import cancel


async def test_a_task_that_swallows_a_cancellation_is_cancelled_again() -> None:
    async def stubborn() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)

    await asyncio.wait_for(cancel([task]), 60)

    assert task.cancelled()


async def test_what_a_task_raises_while_it_ends_does_not_disturb_the_others() -> None:
    async def raising() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ZeroDivisionError

    tasks = [asyncio.create_task(raising()), asyncio.create_task(asyncio.Event().wait())]
    await asyncio.sleep(0)

    await cancel(tasks)

    assert all(task.done() for task in tasks)
