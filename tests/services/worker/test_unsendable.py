"""What no message can hold, and ends that went astray: a command always comes to its end."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from noetl_core.bus.connection import Bus
from noetl_core.domain.errors import ToolError
from noetl_core.store.postgres import Pool
from noetl_core.wire.messages import Done, decode_messages
from noetl_worker.emit import Outbox
from noetl_worker.perform import Performer
from noetl_worker.safe_errors import safe_error
from services.worker.desk import (
    WAIT_SECONDS,
    Ear,
    config,
    eventually,
    issue,
    listening,
    playbook,
    register,
    until,
    working,
)

ROUTED = """
- step: a
  tool:
    kind: python
    code: |
      result = {"x": 2**70, "y": 1}
  next:
    arcs:
      - step: b
        when: "{{ output.x > output.y }}"
- step: b
  tool: {kind: noop}
"""

SET = """
- step: a
  tool:
    kind: noop
    set: {ctx.big: "{{ 2**70 }}"}
"""

HALF_A_CHARACTER = """
- step: a
  tool:
    kind: python
    code: |
      print("odd: " + chr(0xdcff))
      raise ValueError("bad " + chr(0xdcff))
"""

NOTHING = """
- step: a
  tool: {kind: noop}
"""


@pytest.fixture
async def ear(nats_url: str, pool: Pool) -> AsyncIterator[Ear]:
    async with listening(nats_url, pool) as listener:
        yield listener


async def test_a_number_that_no_message_can_hold_stays_behind_its_reference(
    database: str, pool: Pool, nats_url: str, ear: Ear
) -> None:
    key = await issue(pool, await register(pool, playbook(ROUTED)), "a")

    async with working(config(database, nats_url)):
        assert await ear.done(key) == {"x": 2**70, "y": 1}

    (end,) = ear.ends
    assert end.context == {"y": 1}, "the broker reads the other one from the result"


async def test_a_number_that_no_message_can_hold_is_refused_in_ctx(
    database: str, pool: Pool, nats_url: str, ear: Ear
) -> None:
    key = await issue(pool, await register(pool, playbook(SET)), "a")

    async with working(config(database, nats_url)):
        failed = await ear.failed(key)

    assert (failed.error.kind, failed.error.code) == ("parse", "NOT_JSON")
    assert "`set` of ctx.big gives what is no plain data" in failed.error.message
    assert "beyond 64 bits" in failed.error.message


def test_a_number_that_no_message_can_hold_is_text_in_the_details_of_an_error() -> None:
    error = ToolError(kind="k", message="half " + chr(0xDCFF), details={"n": [2**70, 2**64 - 1]})

    safe = safe_error(error, ())

    assert (safe.message, safe.details) == ("half ?", {"n": [str(2**70), 2**64 - 1]})
    assert msgspec.msgpack.encode(safe)


async def test_an_error_with_half_a_character_in_its_text_is_that_error(
    database: str, pool: Pool, nats_url: str, ear: Ear
) -> None:
    key = await issue(pool, await register(pool, playbook(HALF_A_CHARACTER)), "a")

    async with working(config(database, nats_url)):
        failed = await ear.failed(key)

    assert (failed.error.kind, failed.error.message) == ("python_error", "ValueError: bad ?")


async def test_an_end_that_cannot_be_packed_is_told_as_a_failure_and_frees_its_slot(
    database: str, pool: Pool, nats_url: str, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog_id = await register(pool, playbook(NOTHING))
    whole = Performer.perform

    async def unsendable(self: Performer, leased: Any) -> Any:
        end = await whole(self, leased)
        assert isinstance(end, Done), end
        return Done(
            execution_id=end.execution_id,
            command_id=end.command_id,
            worker_id=end.worker_id,
            ctx={"half": chr(0xDCFF)},
        )

    monkeypatch.setattr(Performer, "perform", unsendable)
    async with working(config(database, nats_url, worker_slots=1)):
        first = await ear.failed(await issue(pool, catalog_id, "a", index=0))
        second = await ear.failed(await issue(pool, catalog_id, "a", index=1))

    assert first.error.kind == second.error.kind == "internal"
    assert "cannot be sent" in first.error.message


async def test_what_goes_wrong_beside_a_command_is_told_as_its_failure(
    database: str, pool: Pool, nats_url: str, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: Performer, leased: Any) -> Any:
        raise LookupError("a bug")

    monkeypatch.setattr(Performer, "perform", broken)
    key = await issue(pool, await register(pool, playbook(NOTHING)), "a")

    async with working(config(database, nats_url)):
        failed = await ear.failed(key)

    assert (failed.error.kind, failed.error.message) == ("internal", "LookupError: a bug")


async def test_a_command_whose_task_dies_is_let_go_of(
    database: str, pool: Pool, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(Outbox, "finish", die)
    await issue(pool, await register(pool, playbook(NOTHING)), "a")

    async with working(config(database, nats_url, lease_seconds=0.9, heartbeat_seconds=0.2)):
        await until(pool, "SELECT lease_until < now() FROM noetl.command")


async def test_an_end_whose_way_out_broke_is_said_again(
    database: str, pool: Pool, nats_url: str, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    async def breaks_once(self: Bus, subject: str, body: bytes) -> bool:
        if any(isinstance(message, Done) for message in decode_messages(body)):
            tries.append(body)
            if len(tries) == 1:
                raise LookupError("a bug")
        return False

    monkeypatch.setattr(Bus, "publish", breaks_once)
    monkeypatch.setattr("noetl_worker.held.REPUBLISH_SECONDS_MIN", 0.3)
    await issue(pool, await register(pool, playbook(NOTHING)), "a")

    async with working(config(database, nats_url)):
        await eventually(lambda: len(tries) >= 2)
        async with asyncio.timeout(WAIT_SECONDS):
            while not ear.ends:
                await ear.drain_inbox()

    assert [type(end) for end in ear.ends] == [Done]


async def test_an_acknowledgement_that_nobody_can_read_sends_the_end_by_the_inbox(
    database: str, pool: Pool, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd:
        data = b"no json"

    async def odd_request(*_: Any, **__: Any) -> Odd:
        return Odd()

    monkeypatch.setattr("nats.aio.client.Client.request", odd_request)
    await issue(pool, await register(pool, playbook(NOTHING)), "a")

    async with working(config(database, nats_url)):
        await until(pool, "SELECT count(*) > 0 FROM noetl.inbox")
