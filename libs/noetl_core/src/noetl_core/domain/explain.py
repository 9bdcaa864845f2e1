"""Why an execution stands where it stands, in a few plain sentences for a person. Pure.

Each sentence is either what is so, or what to do about it.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta

import msgspec

from noetl_core.domain.state import TERMINAL, ExecutionStatus
from noetl_core.domain.waiting import OpenGroup, moment
from noetl_core.domain.workers import tool_of

HOLDERS_MAX = 5
SLOW_MESSAGE_SECONDS = 2.0
LAG_MS_MAX = 2000


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that has a command, and when it last said that it still has it."""

    worker_id: str
    command_id: str
    attempt: int
    silent_seconds: float


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the sentences are made of."""

    execution_id: str
    path: str
    version: int
    status: ExecutionStatus
    now: datetime
    started_at: datetime
    updated_at: datetime
    ended_at: datetime | None = None
    last_event: str | None = None
    last_event_at: datetime | None = None
    steps_done: int = 0
    steps_seen: int = 0
    waiting_on: str | None = None
    groups: tuple[OpenGroup, ...] = ()
    holders: tuple[Holder, ...] = ()
    children: tuple[str, ...] = ()
    broken: str | None = None
    """What is wrong with its status row, if anything is."""
    shard_id: int = 0
    has_broker: bool = True
    has_projection: bool = True
    lag_ms: int = 0
    messages: int = 0
    oldest_message_seconds: float = 0.0
    timer: str | None = None
    due_at: datetime | None = None
    error: str | None = None
    last_error: str | None = None
    is_flagged: bool = False
    is_archived: bool = False
    dead_letters: tuple[int, ...] = ()


def explain(facts: Facts) -> list[str]:
    if facts.status in TERMINAL:
        return [*_end(facts), *_parked(facts)]
    return [*_standing(facts), *_moved_by(facts), *_trouble(facts), *_parked(facts)]


def _end(facts: Facts) -> Iterator[str]:
    when = "" if facts.ended_at is None else f" at {moment(facts.ended_at)}"
    took = (facts.ended_at or facts.updated_at) - facts.started_at
    yield f"{_name(facts)} ended as {facts.status}{when}, after {lasting(took)}."
    if facts.error is not None:
        yield f"The reason: {facts.error}"
    if facts.status == "COMPLETED":
        return
    if facts.is_archived:
        yield (
            "It is past retention and in an archive, so it cannot go on; it can run again from "
            f"its beginning: `noetl rerun {facts.execution_id}`."
        )
    else:
        yield f"It can go on from where it ended: `noetl retry {facts.execution_id}`."


def _standing(facts: Facts) -> Iterator[str]:
    steps = f"; {facts.steps_done} of the {facts.steps_seen} steps it entered are done"
    yield (
        f"{_name(facts)} is {facts.status}; it began {lasting(facts.now - facts.started_at)} ago"
        f"{steps if facts.steps_seen else ''}."
    )
    if facts.waiting_on is not None:
        yield f"What it waits for: {facts.waiting_on}."
    if facts.last_event is not None and facts.last_event_at is not None:
        ago = lasting(facts.now - facts.last_event_at)
        yield f"The last thing that happened was {facts.last_event}, {ago} ago."


def _moved_by(facts: Facts) -> Iterator[str]:
    """What would move it, and whether anybody has to do something for that."""
    for holder in facts.holders[:HOLDERS_MAX]:
        yield (
            f"Worker `{holder.worker_id}` holds `{holder.command_id}` (attempt {holder.attempt}) "
            f"and said so {holder.silent_seconds:.0f} s ago."
        )
    if len(facts.holders) > HOLDERS_MAX:
        yield f"{len(facts.holders) - HOLDERS_MAX} more commands are held."
    for group in facts.groups:
        if group.situation in ("alone", "elsewhere"):
            yield _worker_to_start(group)
        elif group.situation == "delayed" and group.next_at is not None:
            yield f"Step `{group.step}` goes on by itself at {moment(group.next_at)}."
    for child in facts.children:
        yield f"What the child waits for: `noetl explain {child}`."
    if facts.due_at is not None:
        yield f"Its next timer (`{facts.timer}`) runs out at {moment(facts.due_at)}."


def _worker_to_start(group: OpenGroup) -> str:
    labels = [offer for offer in group.requires if tool_of(offer) is None]
    tools = [f"`{kind}`" for offer in group.requires if (kind := tool_of(offer)) is not None]
    labelled = f" and NOETL_WORKER_LABELS={','.join(labels)}" if labels else ""
    equipped = f", where the package with the tool {' and '.join(tools)} is installed"
    return (
        f"To move it, start a worker with NOETL_WORKER_POOL={group.pool}{labelled}"
        f"{equipped if tools else ''}."
    )


def _trouble(facts: Facts) -> Iterator[str]:
    if not facts.has_broker:
        yield f"No broker owns its shard {facts.shard_id}: nothing moves until a broker runs."
    if facts.messages and (
        not facts.has_broker or facts.oldest_message_seconds > SLOW_MESSAGE_SECONDS
    ):
        count = "1 message" if facts.messages == 1 else f"{facts.messages} messages"
        verb = "waits" if facts.messages == 1 else "wait"
        yield f"{count} for it {verb} to be read, for {facts.oldest_message_seconds:.0f} s by now."
    if not facts.has_projection:
        yield (
            f"No projection owns its shard {facts.shard_id}: "
            "the status stands still until a projection runs."
        )
    if facts.broken is not None:
        yield f"What is said here may be wrong: {facts.broken}."
    if facts.lag_ms > LAG_MS_MAX:
        behind = lasting(timedelta(milliseconds=facts.lag_ms))
        yield f"The status lags behind the log: what is said here may be of {behind} ago."
    if facts.last_error is not None:
        yield f"The last error: {facts.last_error}"
    if facts.is_flagged:
        yield (
            f"End it with `noetl cancel {facts.execution_id}`, and then let it go on with "
            f"`noetl retry {facts.execution_id}` if it should."
        )


def _parked(facts: Facts) -> Iterator[str]:
    for dead_letter in facts.dead_letters:
        yield f"Something about it was set aside: `noetl dead-letters show {dead_letter}`."


def _name(facts: Facts) -> str:
    return f"Execution {facts.execution_id} of `{facts.path}` v{facts.version}"


def lasting(time: timedelta) -> str:
    """`4 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`: the two largest units that matter."""
    seconds = max(0, round(time.total_seconds()))
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    parts = []
    for unit, size in units:
        number, seconds = divmod(seconds, size)
        if number:
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2]) or "0 s"
