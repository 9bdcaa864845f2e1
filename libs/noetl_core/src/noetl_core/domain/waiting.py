"""What an execution waits for at this moment, in a sentence: what its state cannot know.

The state says that a command waits for a worker. Whether its time has come, whether a worker that
could take it lives, whether the one that holds it has fallen silent: that is in the queue and among
the processes, and it changes without an event.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

PARTS_MAX = 3
"""A sentence says so many things; the rest is a number of commands."""


class OpenGroup(NamedTuple):
    """Commands of a step that are in the same situation."""

    step: str
    pool: str
    commands: int
    situation: str
    """running, silent, delayed, held, ready or alone: the last has no living worker to wait for."""
    requires: tuple[str, ...] = ()
    attempt: int = 1
    next_at: datetime | None = None


_ORDER = ("running", "silent", "alone", "ready", "delayed", "held")


def waits_for(
    projected: str | None, groups: Sequence[OpenGroup], *, flag: str | None = None
) -> str | None:
    """`projected` is what the state alone says; it stands where no command is open."""
    if flag is not None:
        return f"nothing can move it: {flag}"
    if not groups:
        return projected
    ordered = sorted(groups, key=lambda g: (_ORDER.index(g.situation), g.step))
    parts = [sentence_of(group) for group in ordered[:PARTS_MAX]]
    more = sum(group.commands for group in ordered[PARTS_MAX:])
    return "; ".join([*parts, *([f"and {more} more commands"] if more else [])])


def sentence_of(group: OpenGroup) -> str:
    who = f"{group.commands} command{'' if group.commands == 1 else 's'} of step `{group.step}`"
    is_one = group.commands == 1
    match group.situation:
        case "running":
            return f"{who} {'is' if is_one else 'are'} running"
        case "silent":
            lost = "was" if is_one else "were"
            return f"{who} {lost} lost with a worker that fell silent, and will be tried again"
        case "delayed":
            when = "" if group.next_at is None else f" at {moment(group.next_at)}"
            again = f"will be tried again (attempt {group.attempt})"
            return f"{who} {again if group.attempt > 1 else 'will begin'}{when}"
        case "held":
            return f"{who} {'is' if is_one else 'are'} held back until it is resumed"
        case "alone":
            wait = "waits" if is_one else "wait"
            return f"{who} {wait} for {_worker(group)}, and none is online"
        case _:
            wait = "waits" if is_one else "wait"
            return f"{who} {wait} for a free {_worker(group).removeprefix('a ')}"


def _worker(group: OpenGroup) -> str:
    offers = f" that has {_listed(group.requires)}" if group.requires else ""
    return f"a worker of pool `{group.pool}`{offers}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def moment(when: datetime) -> str:
    return when.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
