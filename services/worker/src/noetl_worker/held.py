"""What this worker holds: commands that run, and results that nobody has confirmed yet.

A command is held from its lease until its row is seen to be gone. That is the confirmation that its
end was recorded, and it is the only one: an acknowledgement of NATS is not proof, because NATS
acknowledges before it writes to disk.

    leased ─> running ─┬─> finished ─> published ─┬─> row gone: forget it
                       │                          └─> row still there: publish again
                       └─> row gone: stop it

It is published again whether or not the first time came to its end: whatever went wrong with that,
the row that is still there says so.

A command that is parked is finished here like any other: the broker removes its row when it records
what the command waits for, and until then we say it again. Nobody waits in this process.

The heartbeat's thread reads the keys; everything else happens on the loop of the worker.
"""

import asyncio
import time
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from noetl_core.domain.ids import ShardId
from noetl_core.store.command import CommandKey, Leased

REPUBLISH_SECONDS_MIN = 2.0
"""A result that is published and not recorded after this is published again."""

REPUBLISH_SECONDS_MAX = 60.0

CONFIRM_COUNT = 1000
CONFIRM_BYTES = 16 * 1024 * 1024
"""More unconfirmed results than this are looked after at once, not at the next heartbeat."""

UNCONFIRMED_COUNT_MAX = 20_000
UNCONFIRMED_BYTES_MAX = 256 * 1024 * 1024
"""With so much unconfirmed no new work is taken: the brokers are behind, or away."""


class Finished(NamedTuple):
    """The encoded message that says how a command ended, or that it is parked."""

    shard_id: ShardId
    body: msgspec.Raw
    size: int
    follows_chunks: bool = False
    """It must not arrive before the chunks that were sent ahead."""


class HeldCommand:
    __slots__ = ("begun_ns", "finished", "leased", "patience", "said_at", "task")

    def __init__(self, leased: Leased, task: "asyncio.Task[None]") -> None:
        self.leased = leased
        self.begun_ns = time.time_ns()
        self.task = task
        self.finished: Finished | None = None
        self.said_at = 0.0
        """When its end was published last, or was to be."""
        self.patience = REPUBLISH_SECONDS_MIN


class Verdict(NamedTuple):
    """What a look at the rows means for what we hold."""

    stopped: list[HeldCommand]
    confirmed: int
    overdue: list[HeldCommand]


class Held:
    def __init__(self) -> None:
        self._commands: dict[CommandKey, HeldCommand] = {}
        self._abandoned: set[CommandKey] = set()
        self.running = 0
        self.unconfirmed = 0
        self.unconfirmed_bytes = 0

    def __contains__(self, key: CommandKey) -> bool:
        return key in self._commands

    def add(self, leased: Leased, task: "asyncio.Task[None]") -> None:
        self._commands[leased.key] = HeldCommand(leased, task)
        self.running += 1

    def finish(self, key: CommandKey, finished: Finished) -> None:
        command = self._commands[key]
        command.finished, command.said_at = finished, time.monotonic()
        self.running -= 1
        self.unconfirmed += 1
        self.unconfirmed_bytes += finished.size

    def drop(self, key: CommandKey) -> None:
        """Stopped without a result."""
        command = self._commands.pop(key, None)
        if command is not None and command.finished is None:
            self.running -= 1

    def abandon(self, key: CommandKey) -> None:
        """Its task died, by a bug: the lease shall run out, and count as a loss."""
        self.drop(key)
        self._abandoned.add(key)

    def publish(self, keys: Iterable[CommandKey]) -> None:
        now = time.monotonic()
        for key in keys:
            command = self._commands.get(key)
            if command is not None:
                command.said_at = now

    def keys(self) -> list[CommandKey]:
        """Safe to call from the heartbeat's thread: one step of the interpreter."""
        return list(self._commands)

    def known_keys(self) -> list[CommandKey]:
        """What is leased to us with our knowing. Safe to call from the heartbeat's thread."""
        return [*list(self._commands), *list(self._abandoned)]

    def running_commands(self) -> list[HeldCommand]:
        return [command for command in self._commands.values() if command.finished is None]

    @property
    def wants_confirmation(self) -> bool:
        return self.unconfirmed > CONFIRM_COUNT or self.unconfirmed_bytes > CONFIRM_BYTES

    @property
    def is_full(self) -> bool:
        return (
            self.unconfirmed > UNCONFIRMED_COUNT_MAX
            or self.unconfirmed_bytes > UNCONFIRMED_BYTES_MAX
        )

    def judge(
        self, asked: Iterable[CommandKey], still_there: set[CommandKey], asked_at: float
    ) -> Verdict:
        """Forget what is recorded; say what to stop and what to publish again."""
        stopped: list[HeldCommand] = []
        overdue: list[HeldCommand] = []
        confirmed = 0
        for key in asked:
            command = self._commands.get(key)
            if command is None:
                continue
            if key not in still_there:
                if command.finished is None:
                    stopped.append(command)
                else:
                    self._confirm(key, command.finished)
                    confirmed += 1
            elif _is_overdue(command, asked_at):
                overdue.append(command)
        return Verdict(stopped, confirmed, overdue)

    def _confirm(self, key: CommandKey, finished: Finished) -> None:
        del self._commands[key]
        self.unconfirmed -= 1
        self.unconfirmed_bytes -= finished.size


def _is_overdue(command: HeldCommand, asked_at: float) -> bool:
    """Said long enough before we looked. Each time we wait twice as long: a broker that is
    behind is not helped by more messages.
    """
    if command.finished is None or asked_at - command.said_at < command.patience:
        return False
    command.patience = min(REPUBLISH_SECONDS_MAX, command.patience * 2)
    return True
