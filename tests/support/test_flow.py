"""The laws that are held against every log would notice if one were broken."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from support.flow import Event, Execution, assert_log_is_sound, most_at_once

LOOP = 10


def event(event_id: int, event_type: str, key: str = "", **more: Any) -> Event:
    blank = dict.fromkeys(Event.__struct_fields__)
    given = {"event_id": event_id, "event_type": event_type, "event_key": key or str(event_id)}
    return msgspec.convert(
        {**blank, "context": {}, "meta": {}, "at": 0.0, "bytes": 0, **given, **more}, Event
    )


def of_item(event_id: int, event_type: str, **more: Any) -> Event:
    return event(event_id, event_type, command_id="s.1/0#1", loop_id=LOOP, iter_index=0, **more)


SOUND = (
    event(1, "execution.started"),
    event(LOOP, "loop.started"),
    of_item(11, "command.issued"),
    of_item(12, "command.claimed"),
    of_item(13, "call.done"),
    event(14, "loop.done", loop_id=LOOP),
    event(15, "execution.completed"),
)

BREACHES: dict[str, Callable[[list[Event]], object]] = {
    "a key twice": lambda log: log.append(event(20, "step.enter", key="1")),
    "a command issued twice": lambda log: log.append(of_item(20, "command.issued")),
    "an attempt that ends twice": lambda log: log.append(of_item(20, "call.error")),
    "an end of what was never issued": lambda log: log.append(event(20, "call.done")),
    "two ends": lambda log: log.append(event(20, "execution.cancelled")),
    "no end": lambda log: log.pop(),
    "a loop that ends twice": lambda log: log.append(event(20, "loop.done", loop_id=LOOP)),
    "a loop that does not end": lambda log: log.pop(5),
    "an end of no loop": lambda log: log.append(event(20, "loop.done", loop_id=99)),
    "a payload in the log": lambda log: log.append(event(20, "step.exit", bytes=4000)),
    "five rows for an item": lambda log: log.extend(
        of_item(number, "command.parked") for number in (20, 21)
    ),
}


def execution_of(log: list[Event]) -> Execution:
    return Execution(1, log, {"status": "COMPLETED"}, {})


def test_a_sound_log_is_sound() -> None:
    assert_log_is_sound(execution_of(list(SOUND)))


@pytest.mark.parametrize("breach", BREACHES.values(), ids=BREACHES.keys())
def test_a_log_that_breaks_a_law_is_not_sound(breach: Callable[[list[Event]], object]) -> None:
    log = list(SOUND)
    breach(log)

    with pytest.raises(AssertionError):
        assert_log_is_sound(execution_of(log))


def test_calls_that_follow_each_other_do_not_overlap() -> None:
    assert most_at_once([(0.0, 1.0), (1.0, 2.0)]) == 1
    assert most_at_once([(0.0, 1.0), (0.5, 2.0), (0.9, 1.5)]) == 3
