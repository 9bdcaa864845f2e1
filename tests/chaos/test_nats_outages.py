"""NATS ends in the middle of everything, or loses all it has: the log is the same, key by key.

Nothing but NATS is disturbed, so no attempt may be lost either: a key of one would be a difference.
"""

import asyncio
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import nats
import pytest
from nats.js import JetStreamContext

from chaos import mixed_load
from chaos.mixed_load import Key, Log
from chaos.stack import Stack, running_stack
from chaos.test_placement import another_worker, until_ready
from flow.conftest import PATIENT_LEASES
from support.flow import Flow
from support.nats import NatsServer
from support.postgres import free_port

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(900)]

SPEED_MIN = 0.35
"""What is left of the throughput of a loop without NATS, at least. Measured: 0.9 to 2, because the
rest of the load is over by then."""
STEP_SECONDS_MAX = 0.6
"""A step of a chain without NATS, beside the load; measured: 0.1 to 0.2 s."""
LINES_PER_SECOND_MAX = 5.0


@contextmanager
def running(directory: Path, nats_url: str, api: str, *options: str) -> Iterator[Flow]:
    options = ("--processes", "--workers", "2", "--nats", nats_url, *options)
    with running_stack(directory, *options, **PATIENT_LEASES) as stack:
        yield Flow(stack, api)


class Watch:
    """The processes and the logs of a stack from here on."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._began_at = time.monotonic()
        self._parts = stack.parts()
        self._places = {name: len(stack.log(name)) for name in self._parts}

    def assert_calm(self) -> None:
        assert self._stack.parts() == self._parts, "a part was started again"
        seconds = time.monotonic() - self._began_at
        for name, place in self._places.items():
            said = [_said(line) for line in self._stack.log(name)[place:].splitlines()]
            # One line for a failed call or a report is what they are for.
            lines = [what for what in said if what not in ("command.failed", "reaper.reported")]
            most = Counter(lines).most_common(3)
            assert len(lines) / seconds < LINES_PER_SECOND_MAX, (name, seconds, most)


def _said(line: str) -> str:
    try:
        return str(json.loads(line)["event"])
    except (ValueError, KeyError):
        return line


@pytest.mark.parametrize("way", ["ends", "freezes"])
async def test_a_nats_that_never_comes_back_changes_nothing_but_time(
    own_nats: NatsServer, api: str, usual: Log, tmp_path: Path, way: str
) -> None:
    with running(tmp_path, own_nats.url, api) as flow:
        await mixed_load.prepare(flow)
        watch = Watch(flow.stack)

        async def disturb() -> None:
            own_nats.kill() if way == "ends" else own_nats.pause()

        run = await mixed_load.run(flow, disturb)
        print(f"\nNATS {way} at half: {run}")
        watch.assert_calm()
        await assert_epochs_are_recorded(flow.stack)
        await flow.stack.client.aclose()

    assert run.log == usual
    if way == "ends":
        before, after = run.loop_rates
        assert after > SPEED_MIN * before
        assert run.chain_seconds < STEP_SECONDS_MAX * mixed_load.CHAIN


async def test_a_killed_broker_and_a_killed_worker_are_replaced_while_nats_is_away(
    own_nats: NatsServer, api: str, usual: Log, tmp_path: Path
) -> None:
    with running(tmp_path, own_nats.url, api) as flow:
        await mixed_load.prepare(flow)
        parts = flow.stack.parts()

        async def disturb() -> None:
            own_nats.kill()
            os.kill(parts["broker"], signal.SIGKILL)
            os.kill(parts["worker-1"], signal.SIGKILL)

        run = await mixed_load.run(flow, disturb)
        print(f"\nNATS, the broker and a worker killed at half: {run}")
        await flow.stack.client.aclose()

    for name, log in run.log.items():
        assert without_attempts(log) == without_attempts(usual[name]), name
    lost = [key for log in run.log.values() for kind, key in log if kind == "command.expired"]
    assert lost, "the worker held nothing: this shows nothing of it"


def without_attempts(log: Counter[Key]) -> Counter[Key]:
    """Only what the last attempt of each call recorded: `load.1/17#2` counts as `load.1/17`."""
    kept: Counter[Key] = Counter()
    for kind, key in log:
        if kind != "command.expired":
            kept[kind, re.sub(r"#\d+", "", key)] = 1
    return kept


async def test_a_system_that_never_had_nats_records_the_same(
    api: str, usual: Log, tmp_path: Path
) -> None:
    with running(tmp_path, f"nats://127.0.0.1:{free_port()}", api) as flow:
        watch = Watch(flow.stack)
        await mixed_load.prepare(flow)
        run = await mixed_load.run(flow)
        print(f"\nnever had NATS: {run}")
        watch.assert_calm()
        await assert_epochs_are_recorded(flow.stack)
        await flow.stack.client.aclose()

    assert run.log == usual


async def delete_streams(jetstream: JetStreamContext) -> None:
    for stream in await jetstream.streams_info():
        await jetstream.delete_stream(str(stream.config.name))


async def purge_streams(jetstream: JetStreamContext) -> None:
    for stream in await jetstream.streams_info():
        await jetstream.purge_stream(str(stream.config.name))


async def delete_consumers(jetstream: JetStreamContext) -> None:
    for stream in await jetstream.streams_info():
        name = str(stream.config.name)
        for consumer in await jetstream.consumers_info(name):
            await jetstream.delete_consumer(name, consumer.name)


@pytest.mark.parametrize("lose", [delete_streams, purge_streams, delete_consumers])
async def test_what_nats_loses_changes_nothing_but_time(
    own_nats: NatsServer,
    api: str,
    usual: Log,
    tmp_path: Path,
    lose: Callable[[JetStreamContext], Awaitable[None]],
) -> None:
    client = await nats.connect(own_nats.url)
    jetstream = client.jetstream()
    with running(tmp_path, own_nats.url, api) as flow:
        await mixed_load.prepare(flow)
        watch = Watch(flow.stack)

        async def disturb() -> None:
            (stream,) = await jetstream.streams_info()
            assert stream.state.messages > 0, "nothing was there to lose"
            await lose(jetstream)

        run = await mixed_load.run(flow, disturb)
        print(f"\n{lose.__name__} at half: {run}")
        watch.assert_calm()
        (stream,) = await jetstream.streams_info()
        assert stream.state.messages > 0
        assert stream.state.consumer_count == 16
        await flow.stack.client.aclose()
    await client.close()

    assert run.log == usual


async def test_the_fast_road_is_taken_again_when_nats_is_back(
    own_nats: NatsServer, api: str, usual: Log, tmp_path: Path
) -> None:
    port = free_port()
    own_nats.stop()
    with running(tmp_path, own_nats.url, api, "--workers", "0") as flow:
        stack = flow.stack
        await mixed_load.prepare(flow)
        with another_worker(stack, "watched", "cpu", NOETL_HEALTH_PORT=str(port), **PATIENT_LEASES):
            await until_ready(stack, "watched")
            away = await mixed_load.run(flow)
            assert await batches(port, "nats") == 0

            async def come_back() -> None:
                own_nats.start()

            run = await mixed_load.run(flow, come_back)
            by_nats, by_inbox = await batches(port, "nats"), await batches(port, "inbox")
            assert by_nats > 0
            back = await mixed_load.run(flow)
            print(f"\naway: {away}\nback at half: {run}\nback: {back}")
            fast = await batches(port, "nats") - by_nats
            slow = await batches(port, "inbox") - by_inbox
            assert fast > 0
            # A publication that a busy machine does not hear of in time takes the slow road, too.
            assert slow < 0.02 * fast, "the slow road is taken still"
        await stack.client.aclose()

    assert away.log == run.log == back.log == usual


async def batches(port: int, road: str) -> float:
    async with httpx.AsyncClient(timeout=60) as client:
        text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    (value,) = re.findall(rf"^noetl_worker_{road}_batches_total\S* (\S+)$", text, re.MULTILINE)
    return float(value)


async def assert_epochs_are_recorded(stack: Stack) -> None:
    """For what still runs: that of an execution that has ended is not needed any more."""
    execution_id = await stack.execute("tests/mixed_endless")
    deadline = time.monotonic() + 60
    sql = "SELECT FROM noetl.checkpoint WHERE execution_id = $1"
    while not await stack.query(sql, execution_id):
        assert time.monotonic() < deadline, "no epoch was recorded"
        await asyncio.sleep(0.1)
    answer = await stack.client.post(f"/api/executions/{execution_id}/cancel", json={})
    assert answer.status_code == 202, answer.text
    assert await stack.until_ended(execution_id) == "execution.cancelled"
