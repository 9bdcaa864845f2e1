"""Sentences about what an execution waits for, as functions of what is known."""

from datetime import UTC, datetime, timedelta

import pytest

from noetl_core.domain.explain import Facts, Holder, explain, lasting
from noetl_core.domain.waiting import PARTS_MAX, OpenGroup, waits_for

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 s"),
        (0.4, "0 s"),
        (59, "59 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (273_601, "3 d 4 h"),
    ],
)
def test_a_time_is_told_in_its_two_largest_units(seconds: float, text: str) -> None:
    assert lasting(timedelta(seconds=seconds)) == text


def test_a_sentence_says_a_few_things_and_counts_the_rest() -> None:
    groups = [OpenGroup(f"s{n}", "cpu", 2, "running") for n in range(PARTS_MAX + 2)]

    sentence = waits_for("whatever", groups)

    assert sentence is not None
    assert sentence.count("are running") == PARTS_MAX
    assert sentence.endswith("and 4 more commands")


def test_what_nobody_has_begun_is_not_tried_again() -> None:
    first = OpenGroup("a", "cpu", 1, "delayed", attempt=1, next_at=NOW)

    assert waits_for(None, [first]) == "1 command of step `a` will begin at 2026-01-01T12:00:00Z"


def test_many_holders_are_named_and_then_counted() -> None:
    holders = tuple(
        Holder(worker_id=f"w{n}", command_id=f"a.1/{n}#1", attempt=1, silent_seconds=1)
        for n in range(8)
    )
    facts = Facts(
        execution_id="1",
        path="p",
        version=1,
        status="RUNNING",
        now=NOW,
        started_at=NOW - timedelta(minutes=5),
        updated_at=NOW,
        holders=holders,
    )

    sentences = explain(facts)

    assert sentences[0] == "Execution 1 of `p` v1 is RUNNING; it began 5 min ago."
    assert "3 more commands are held." in sentences
