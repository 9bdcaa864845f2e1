"""What `noetl test` prints: one line a test, and below a failed one what was different."""

from collections.abc import Iterator

from noetl_cli.playbook_tests.expectations import Difference
from noetl_cli.playbook_tests.runner import Outcome


def outcome_lines(outcome: Outcome) -> Iterator[str]:
    verdict = "ok  " if outcome.is_passed else "FAIL"
    yield f"{verdict}  {outcome.file}: {outcome.name}"
    for difference in outcome.differences:
        yield from _difference_lines(difference)
    if not outcome.is_passed:
        yield f"      path taken: {' -> '.join(outcome.path) or 'none'}"


def _difference_lines(difference: Difference) -> Iterator[str]:
    yield f"      {difference.place}"
    if difference.expected or difference.got:
        yield f"        expected: {difference.expected}"
        yield f"        got:      {difference.got}"


def summary_line(outcomes: list[Outcome]) -> str:
    failed = sum(not outcome.is_passed for outcome in outcomes)
    return f"{len(outcomes) - failed} passed, {failed} failed"
