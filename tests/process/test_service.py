"""process/service.py: loops, background tasks and the order of the end, inside one process."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from noetl_core.domain.errors import RetryableError
from noetl_core.process import service as service_module
from noetl_core.process.config import Config
from noetl_core.process.service import Service, serving

CONFIG = Config(postgres_dsn="postgresql://nowhere")
SECONDS_MAX = 30
"""Half of what a loop would wait for its next turn."""


async def nothing(_service: Service[Config]) -> None:
    """A start that composes nothing: the test does."""


def sample() -> Service[Config]:
    return Service("sample", CONFIG)


async def lifetime(start: Callable[[Service[Config]], Awaitable[None]]) -> None:
    async with serving(sample(), start) as service:
        await asyncio.wait_for(service.wait_for_death(), SECONDS_MAX)


async def test_the_instance_is_named_after_service_host_and_process_by_default() -> None:
    assert sample().config.instance.startswith("sample-")


async def test_a_turn_that_found_work_is_run_again_at_once() -> None:
    work = [True, True, False]
    idle = asyncio.Event()

    async def turn() -> bool:
        found = work.pop(0)
        if not found:
            idle.set()
        return found

    async with serving(sample(), nothing) as service:
        service.every(60, turn)
        await asyncio.wait_for(idle.wait(), SECONDS_MAX)

    assert work == []


async def test_a_wake_up_cuts_the_wait_short() -> None:
    wake, turns = asyncio.Event(), asyncio.Queue[int]()

    async def turn() -> None:
        turns.put_nowait(1)

    async with serving(sample(), nothing) as service:
        service.every(60, turn, wake=wake)
        await turns.get()
        wake.set()
        await asyncio.wait_for(turns.get(), SECONDS_MAX)


async def test_a_wake_up_during_a_turn_is_not_lost() -> None:
    wake, second = asyncio.Event(), asyncio.Event()
    turns = 0

    async def turn() -> None:
        nonlocal turns
        turns += 1
        (second if turns == 2 else wake).set()

    async with serving(sample(), nothing) as service:
        service.every(60, turn, wake=wake)
        await asyncio.wait_for(second.wait(), SECONDS_MAX)


async def test_a_transient_error_is_waited_out() -> None:
    failures: list[Exception] = [ConnectionResetError(), RetryableError("not yet")]
    recovered = asyncio.Event()

    async def turn() -> None:
        if failures:
            raise failures.pop(0)
        recovered.set()

    async with serving(sample(), nothing) as service:
        service.every(60, turn)
        await asyncio.wait_for(recovered.wait(), SECONDS_MAX)


async def test_any_other_error_is_the_end_of_the_service() -> None:
    async def turn() -> None:
        raise ZeroDivisionError

    async def start(service: Service[Config]) -> None:
        service.every(60, turn)

    with pytest.raises(ZeroDivisionError):
        await lifetime(start)


async def test_a_background_task_that_returns_is_the_end_of_the_service() -> None:
    async def run() -> None:
        return

    async def start(service: Service[Config]) -> None:
        service.background(run, name="listener")

    with pytest.raises(RuntimeError, match="'listener' ended"):
        await lifetime(start)


async def test_a_background_task_is_cancelled_after_the_callbacks() -> None:
    order: list[str] = []

    async def run() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            order.append("cancelled")

    async def callback() -> None:
        order.append("callback")

    async with serving(sample(), nothing) as service:
        service.background(run, name="listener")
        service.on_stop(callback)
        await asyncio.sleep(0)

    assert order == ["callback", "cancelled"]


async def test_a_turn_that_does_not_end_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "STOP_SECONDS_MAX", 0.05)
    cancelled = False

    async def turn() -> None:
        nonlocal cancelled
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled = True
            raise

    async with serving(sample(), nothing) as service:
        service.every(60, turn)
        await asyncio.sleep(0)

    assert cancelled


async def test_a_callback_that_cannot_reach_postgres_does_not_spoil_the_end() -> None:
    released: list[str] = []

    async def first() -> None:
        released.append("first")

    async def second() -> None:
        raise ConnectionRefusedError

    async with serving(sample(), nothing) as service:
        service.on_stop(first)
        service.on_stop(second)

    assert released == ["first"]
