"""What an execution waits for at this moment, in a sentence: what its state cannot know.

The state says that a command waits for a worker. Whether its time has come, whether a worker that
could take it lives, whether the one that holds it has fallen silent: that is in the queue and among
the processes, and it changes without an event.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from noetl_core.domain.progress import BESIDES
from noetl_core.domain.workers import tool_of

PARTS_MAX = 3
"""A sentence says so many things; the rest is a number of commands."""


class OpenGroup(NamedTuple):
    """Commands of a step that are in the same situation."""

    step: str
    pool: str
    commands: int
    situation: str
    """running, silent, delayed, held, ready, meant, elsewhere, alone or lost.

    meant: for one worker, until `next_at`. elsewhere: only another system serves the pool. alone:
    there is no living worker to wait for. lost: it is not in the queue any more.
    """
    requires: tuple[str, ...] = ()
    attempt: int = 1
    next_at: datetime | None = None
    target: str | None = None
    is_target_online: bool = True


_ORDER = ("running", "silent", "lost", "alone", "elsewhere", "ready", "meant", "delayed", "held")


def waits_for(
    projected: str | None,
    groups: Sequence[OpenGroup],
    *,
    flag: str | None = None,
    has_broker: bool = True,
) -> str | None:
    """`projected` is what the state alone says. Of open commands the groups know more; what it says
    of those that are parked stands beside them.
    """
    if flag is not None:
        return f"nothing can move it: {flag}"
    if not groups:
        is_lost = projected is not None and "for the broker" in projected and not has_broker
        return f"{projected}, and no broker owns its shard" if is_lost else projected
    besides = (projected or "").partition(BESIDES)[2]
    return f"{_open(groups)}{BESIDES if besides else ''}{besides}"


def _open(groups: Sequence[OpenGroup]) -> str:
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
            again = "the broker tries again, unless that has happened too often"
            return f"{who} {lost} lost with a worker that fell silent; {again}"
        case "lost":
            lost = "was" if is_one else "were"
            return f"{who} {lost} lost from the queue; the broker tries again, told by the reaper"
        case "delayed":
            when = "" if group.next_at is None else f" at {moment(group.next_at)}"
            again = f"will be tried again (attempt {group.attempt})"
            return f"{who} {again if group.attempt > 1 else 'will begin'}{when}"
        case "held":
            return f"{who} {'is' if is_one else 'are'} held back until it is resumed"
        case "alone":
            wait = "waits" if is_one else "wait"
            return f"{who} {wait} for {_worker(group)}, and none is online"
        case "elsewhere":
            wait = "waits" if is_one else "wait"
            other = "workers of another system are registered for it, none of ours is online"
            return f"{who} {wait} for {_worker(group)}: {other}"
        case "meant":
            return f"{who} {'is' if is_one else 'are'} meant for {_target(group)}"
        case _:
            wait = "waits" if is_one else "wait"
            return f"{who} {wait} for a free {_worker(group).removeprefix('a ')}"


def _target(group: OpenGroup) -> str:
    until = "" if group.next_at is None else f" until {moment(group.next_at)}"
    offline = "" if group.is_target_online else " (it is not online)"
    return f"worker `{group.target}`{offline}{until}; then any of pool `{group.pool}` may take it"


def _worker(group: OpenGroup) -> str:
    offers = f" that has {_listed(group.requires)}" if group.requires else ""
    return f"a worker of pool `{group.pool}`{offers}"


def _listed(offers: Iterable[str]) -> str:
    return ", ".join(_offer(offer) for offer in sorted(offers))


def _offer(offer: str) -> str:
    kind = tool_of(offer)
    return f"`{offer}`" if kind is None else f"the tool `{kind}`"


def moment(when: datetime) -> str:
    return when.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
