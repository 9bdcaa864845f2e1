"""Old names of events, where they come in from outside."""

from pathlib import Path

import pytest

from noetl_core.domain.events import FACT_BY_TYPE
from noetl_core.wire.legacy_events import OLD_NAMES, current_name


@pytest.mark.parametrize(
    ("old", "current"),
    [
        ("execution_start", "execution.started"),
        ("execution_started", "execution.started"),
        ("step_started", "step.enter"),
        ("step_completed", "step.exit"),
        ("step_result", "step.exit"),
        ("action_started", "command.claimed"),
        ("action_completed", "call.done"),
        ("Command.Completed", "call.done"),
        ("RESULT", "call.done"),
        ("action_failed", "call.error"),
        ("action_error", "call.error"),
        ("command.failed", "call.error"),
        ("loop_iteration", "command.issued"),
        ("iterator_started", "loop.started"),
        ("iteration_started", "command.claimed"),
        ("iteration_completed", "call.done"),
        ("iterator_completed", "loop.done"),
        ("loop_completed", "loop.done"),
        ("retry_sequence_completed", "retry.completed"),
        ("loop.shard.done", "loop.shard.done"),
        (" call_done ", "call.done"),
    ],
)
def test_an_old_name_means_the_same_event(old: str, current: str) -> None:
    assert current_name(old) == current


def test_every_event_keeps_its_own_name() -> None:
    assert {name: current_name(name) for name in FACT_BY_TYPE} == {n: n for n in FACT_BY_TYPE}


def test_an_old_name_leads_to_an_event_that_is_recorded() -> None:
    assert OLD_NAMES.keys() <= FACT_BY_TYPE.keys()


def test_no_old_name_has_two_meanings_or_hides_a_current_one() -> None:
    old = [name.replace("_", ".") for names in OLD_NAMES.values() for name in names]

    assert len(old) == len({*old})
    assert not {*old} & FACT_BY_TYPE.keys()


@pytest.mark.parametrize("name", ["", "action", "worker.heartbeat", "step"])
def test_a_name_that_nobody_knows_has_no_meaning(name: str) -> None:
    assert current_name(name) is None


def test_the_page_of_the_classic_dialect_lists_every_old_name() -> None:
    page = (Path(__file__).parents[2] / "docs" / "classic.md").read_text()

    missing = [name for names in OLD_NAMES.values() for name in names if f"`{name}`" not in page]

    assert missing == []
