"""Attempts and pages: what follows an attempt, and what the next one inherits."""

from typing import Any

import pytest

from noetl_core.domain.events import (
    CallDone,
    CallFailed,
    CommandExpired,
    CommandIssued,
    RetryCompleted,
)
from noetl_core.domain.playbook import Circuit, OnError, OnSuccess, Retry
from noetl_core.domain.snowflake import first_id_at
from support.running import FAILED, Run, arc, loop_over, playbook, step

NOW_MS = 1_800_000_000_000


def failing(rule: OnError, **how: Any) -> Run:
    return Run(playbook(step("a", arc("b", FAILED), retry=Retry(on_error=rule), **how), step("b")))


def paging(**rule: Any) -> Run:
    condition = rule.pop("condition", "{{ response.more }}")
    on_success = OnSuccess(condition=condition, **rule)
    return Run(playbook(step("a", retry=Retry(on_success=on_success))))


def issued(run: Run) -> list[CommandIssued]:
    return run.of(CommandIssued)


def delays(run: Run) -> list[float]:
    return [fact.delay_s for fact in issued(run)][1:]


def test_a_failed_attempt_is_followed_by_the_next() -> None:
    run = failing(OnError(max_attempts=3))

    run.fail("a.1#1")

    assert run.said[-2:] == ["call.error a.1#1", "command.issued a.1#2"]
    assert run.state.status == "RUNNING"


def test_an_attempt_names_the_end_of_the_one_before() -> None:
    run = failing(OnError(max_attempts=3))
    run.fail("a.1#1")

    ended = next(event for event in run.events if isinstance(event.fact, CallFailed))
    assert issued(run)[-1].parent_event_id == ended.event_id


def test_after_the_last_attempt_the_step_has_failed() -> None:
    run = failing(OnError(max_attempts=2))

    run.fail("a.1#1", "a.1#2")

    assert run.said[-3:] == ["step.failed a.1", "step.enter b.1", "command.issued b.1#1"]


@pytest.mark.parametrize(
    ("backoff", "expected"),
    [("fixed", [2, 2, 2, 2]), ("linear", [2, 4, 6, 7]), ("exponential", [2, 4, 7, 7])],
)
def test_delays_grow_as_they_are_told_up_to_a_bound(backoff: Any, expected: list[float]) -> None:
    run = failing(OnError(max_attempts=5, backoff=backoff, initial_delay=2, max_delay=7))

    run.fail(*(f"a.1#{attempt}" for attempt in range(1, 5)))

    assert delays(run) == expected


def test_jitter_shortens_a_delay_and_replays_the_same() -> None:
    rule = OnError(max_attempts=2, initial_delay=10, jitter=True)
    first, second = failing(rule), failing(rule)
    first.fail("a.1#1")
    second.fail("a.1#1")

    assert delays(first) == delays(second)
    assert 5 <= delays(first)[0] < 10


def test_a_server_that_says_when_to_come_back_is_believed() -> None:
    run = failing(OnError(max_attempts=2, initial_delay=1, max_delay=5))

    run.fail("a.1#1", retry_after=42)

    assert delays(run) == [42]


def test_a_guard_says_which_errors_are_worth_it() -> None:
    run = failing(OnError(max_attempts=5, when="{{ error.kind == 'rate_limit' }}"))

    run.fail("a.1#1", kind="rate_limit")
    assert run.open == ["a.1#2"]

    run.fail("a.1#2", kind="client_error")
    assert run.state.steps["a"].status == "FAILED"  # type: ignore[index]


def test_a_guard_that_cannot_be_evaluated_says_so_and_hides_nothing() -> None:
    run = failing(OnError(max_attempts=5, when="{{ nothing.here }}"))

    run.fail("a.1#1", kind="boom")

    failed = run.of(CallFailed)[-1]
    assert failed.error.kind == "boom"
    assert "nothing" in failed.error.details["while_handling"]


def test_what_a_template_got_wrong_is_not_tried_again() -> None:
    run = failing(OnError(max_attempts=5))

    run.fail("a.1#1", kind="template_rendering")

    assert "a.1#2" not in run.open


def test_a_lost_attempt_is_no_failure() -> None:
    run = failing(OnError(max_attempts=2))

    run.expire("a.1#1")
    run.fail("a.1#2")

    assert run.open == ["a.1#3"]
    assert [fact.again is not None for fact in run.of(CommandExpired)] == [True]


def test_a_command_that_is_lost_too_often_has_failed() -> None:
    run = failing(OnError(max_attempts=2))

    for attempt in range(1, 6):
        run.expire(f"a.1#{attempt}")

    assert run.state.steps["a"].status == "FAILED"  # type: ignore[index]


def test_an_item_that_is_tried_again_has_not_failed_the_loop() -> None:
    rule = OnError(max_attempts=2)
    run = Run(playbook(step("a", loop=loop_over([1, 2]), retry=Retry(on_error=rule))))

    run.fail("a.1/0#1")
    run.done("a.1/1#1", "a.1/0#2")

    assert run.state.status == "COMPLETED"
    assert (run.state.steps["a"].done, run.state.steps["a"].failed) == (2, 0)  # type: ignore[index]


def test_a_sequential_loop_does_not_go_on_before_an_item_is_through() -> None:
    rule = Retry(on_error=OnError(max_attempts=2))
    run = Run(playbook(step("a", loop=loop_over([1, 2], sequential=True), retry=rule)))

    run.fail("a.1/0#1")

    assert run.open == ["a.1/0#2"]


class Clocked(Run):
    """A run whose events are made at given moments."""

    def at(self, seconds: float) -> None:
        number = first_id_at(NOW_MS + int(seconds * 1000))
        self._ids = iter(range(number, number + 1000))  # type: ignore[assignment]


def watched(**circuit: Any) -> Clocked:
    rule = OnError(max_attempts=9, initial_delay=1, backoff="fixed", circuit=Circuit(**circuit))
    loop = loop_over([1, 2, 3, 4], max_in_flight=2)
    run = Clocked(playbook(step("a", loop=loop, retry=Retry(on_error=rule))))
    run.at(0)
    return run


def test_too_many_failures_open_the_circuit_for_everything_that_follows() -> None:
    run = watched(failures=2, window_s=60, open_s=30)
    run.fail("a.1/0#1")
    assert issued(run)[-1].delay_s == 1

    run.at(1)
    run.fail("a.1/1#1")
    assert issued(run)[-1].delay_s == 30

    run.at(11)
    run.done("a.1/0#2")
    assert issued(run)[-1].delay_s == 0, "a call that went well closes it"


def test_failures_long_ago_do_not_open_the_circuit() -> None:
    run = watched(failures=2, window_s=60, open_s=30)
    run.fail("a.1/0#1")
    run.at(100)
    run.fail("a.1/1#1")

    assert issued(run)[-1].delay_s == 1


def test_a_page_follows_while_the_guard_holds() -> None:
    run = paging(next_call={"params": {"page": "{{ response.page + 1 }}"}}, delay=3)

    run.done("a.1#1", value={"more": True, "page": 1})
    second = issued(run)[-1]
    assert (second.command_id, second.page, second.attempt) == ("a.1@2#1", 2, 1)
    assert (second.call, second.delay_s) == ({"params": {"page": 2}}, 3)

    run.done("a.1@2#1", value={"more": False, "page": 2})
    assert run.said[-4:] == [
        "call.done a.1@2#1",
        "retry.completed a.1",
        "step.exit a.1",
        "execution.completed",
    ]


def test_the_pages_of_a_sequence_are_known_by_the_end_of_the_first() -> None:
    run = paging()
    run.done("a.1#1", value={"more": True})
    run.done("a.1@2#1", value={"more": True})
    run.done("a.1@3#1", value={"more": False})

    first = next(event for event in run.events if isinstance(event.fact, CallDone))
    ended = run.of(RetryCompleted)[0]
    assert (ended.sequence, ended.pages) == (first.event_id, 3)
    assert ended.result.reference is not None
    assert ended.result.reference.type == "pages"
    assert int(ended.result.reference.ref_id) == first.event_id


def test_no_more_pages_than_allowed() -> None:
    run = paging(max_attempts=2)
    run.done("a.1#1", value={"more": True})
    run.done("a.1@2#1", value={"more": True})

    assert run.state.status == "COMPLETED"
    assert run.of(RetryCompleted)[0].pages == 2


def test_a_lost_worker_goes_on_at_the_page_it_was_at() -> None:
    run = paging(next_call={"params": {"after": "{{ response.cursor }}"}})
    run.done("a.1#1", value={"more": True, "cursor": "x"})

    run.expire("a.1@2#1")

    again = issued(run)[-1]
    assert (again.command_id, again.call) == ("a.1@2#2", {"params": {"after": "x"}})
    run.done("a.1@2#2", value={"more": False})
    assert run.of(RetryCompleted)[0].pages == 2


def test_a_page_that_fails_is_tried_again_with_the_same_call() -> None:
    rule = Retry(
        on_error=OnError(max_attempts=2),
        on_success=OnSuccess(
            condition="{{ response.more }}", next_call={"params": {"page": "{{ response.next }}"}}
        ),
    )
    run = Run(playbook(step("a", retry=rule)))
    run.done("a.1#1", value={"more": True, "next": 2})
    run.fail("a.1@2#1")

    assert issued(run)[-1].call == {"params": {"page": 2}}

    run.done("a.1@2#2", value={"more": True, "next": 3})
    third = issued(run)[-1]
    assert (third.command_id, third.failures) == ("a.1@3#1", 0)


def test_a_guard_for_more_pages_that_cannot_be_evaluated_fails_the_step() -> None:
    run = paging(condition="{{ response.paging.more }}")

    run.done("a.1#1", value={"rows": []})

    assert run.state.status == "FAILED"
    assert run.state.error is not None
    assert "retry.on_success.while" in run.state.error.message


def test_every_item_of_a_loop_has_its_own_pages() -> None:
    rule = OnSuccess(
        condition="{{ response.more }}", next_call={"params": {"of": "{{ iter.item }}"}}
    )
    run = Run(playbook(step("a", loop=loop_over(["x", "y"]), retry=Retry(on_success=rule))))
    run.done("a.1/1#1", value={"more": True})
    assert issued(run)[-1].call == {"params": {"of": "y"}}

    run.done("a.1/0#1", value={"more": False})
    run.done("a.1/1@2#1", value={"more": False})

    assert [(f.iter_index, f.pages) for f in run.of(RetryCompleted)] == [(0, 1), (1, 2)]
    assert run.state.status == "COMPLETED"
    assert run.state.steps["a"].done == 2  # type: ignore[index]
