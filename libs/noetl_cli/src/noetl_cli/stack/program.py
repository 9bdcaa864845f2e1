"""A program that the supervisor runs: what to start, as whom, and how it is told to end."""

import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

STOP_SECONDS_DEFAULT = 15.0


class Account(NamedTuple):
    """The user a program runs as, if not ours."""

    uid: int
    gid: int


async def _nothing() -> None:
    """Most programs need no preparation."""


async def _at_once() -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Program:
    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    account: Account | None = None
    waits_for_go: bool = False
    """It loads while others are still starting, and runs when it gets the word (preload.py)."""
    health_port: int = 0
    """Where it answers to /metrics; 0 for one that does not."""
    prepare: Callable[[], Awaitable[None]] = _nothing
    """Runs before every start: clears away what the last process left when it was killed."""
    is_ready: Callable[[], Awaitable[bool]] = _at_once
    stop_signal: int = signal.SIGTERM
    stop_seconds: float = STOP_SECONDS_DEFAULT
    discard_signal: int = signal.SIGKILL
    """Ends it when nothing it holds is needed any more, or when its supervisor has died."""
