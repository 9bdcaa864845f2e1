"""What a test expected against what happened, each difference with its place."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from noetl_cli.playbook_tests.command import Call
from noetl_cli.playbook_tests.dry_run import DryRun
from noetl_cli.playbook_tests.specification import Expected
from noetl_core.domain.ids import StepName

EXACT = "$exact"
_SHOWN_CHARS_MAX = 400


class Difference(NamedTuple):
    """`place` is a path inside `expect`. A difference without values is a sentence."""

    place: str
    expected: str = ""
    got: str = ""

    def as_json(self) -> dict[str, str]:
        return {"place": self.place, "expected": self.expected, "got": self.got}


def differences(expected: Expected, run: DryRun) -> Iterator[Difference]:
    state = run.state
    if state.status != expected.status:
        why = "" if state.error is None else f" ({state.error.kind}: {state.error.message})"
        yield Difference("status", expected.status, f"{state.status}{why}")
    yield from _of_error(expected, run)
    if expected.path is not None and expected.path != run.path:
        yield Difference("path", _arrows(expected.path), _arrows(run.path))
    for step in expected.visited:
        if step not in run.path:
            yield Difference("visited", step, "never entered")
    for step in expected.not_visited:
        if step in run.path:
            yield Difference("not_visited", f"{step} is never entered", _arrows(run.path))
    yield from unlike(expected.ctx, state.ctx, "ctx")
    for step, value in expected.results.items():
        yield from _of_result(step, value, run)
    yield from _of_calls(expected, run)


def _of_error(expected: Expected, run: DryRun) -> Iterator[Difference]:
    if not expected.error:
        return
    error = run.state.error
    if error is None:
        yield Difference("error", shown(expected.error), "none")
        return
    got = msgspec.structs.asdict(error)
    wanted = dict(expected.error)
    message = wanted.pop("message", "")
    # A message is written for people: a part of it is enough.
    if str(message) not in error.message:
        yield Difference("error.message", f"... {message} ...", error.message)
    yield from unlike(wanted, got, "error")


def _of_result(step: str, value: Any, run: DryRun) -> Iterator[Difference]:
    known = run.state.steps.get(StepName(step))
    if known is None:
        yield Difference(f"results.{step}", shown(value), "the step was never entered")
    else:
        yield from unlike(value, run.result_of(step), f"results.{step}")


def _of_calls(expected: Expected, run: DryRun) -> Iterator[Difference]:
    counts: Counter[str] = Counter(run.performed)
    counts.update(f"{call.step}.{call.label}" for call in run.calls)
    for name, count in expected.calls.items():
        if counts[name] != count:
            yield Difference(f"calls.{name}", shown(count), shown(counts[name]))
    for name, value in expected.inputs.items():
        given = [call.input for call in _calls_of(name, run.calls)]
        yield from _of_each_call(f"inputs.{name}", value, given)
    for name, value in expected.config.items():
        given = [call.config for call in _calls_of(name, run.calls)]
        yield from _of_each_call(f"config.{name}", value, given)


def _calls_of(name: str, calls: list[Call]) -> list[Call]:
    """Of a step, the calls of its first task; of a task, its own."""
    own = [call for call in calls if f"{call.step}.{call.label}" == name]
    if own:
        return own
    of_step = [call for call in calls if call.step == name]
    first = of_step[0].label if of_step else ""
    return [call for call in of_step if call.label == first]


def _of_each_call(
    place: str, expected: Any, given: list[Mapping[str, Any]]
) -> Iterator[Difference]:
    """A list is call by call; anything else holds for each of them."""
    if not given:
        yield Difference(place, shown(expected), "it was never called")
    elif isinstance(expected, list):
        yield from unlike(expected, given, place)
    else:
        for number, each in enumerate(given):
            where = place if len(given) == 1 else f"{place}[{number}]"
            yield from unlike(expected, each, where)


def unlike(expected: Any, got: Any, place: str) -> Iterator[Difference]:
    """A mapping may have more than is expected, a list may not; `{$exact: x}` may not either."""
    if isinstance(expected, Mapping) and expected.keys() == {EXACT}:
        if not _same(expected[EXACT], got):
            yield Difference(place, f"exactly {shown(expected[EXACT])}", shown(got))
    elif isinstance(expected, Mapping) and isinstance(got, Mapping):
        for key, value in expected.items():
            if key in got:
                yield from unlike(value, got[key], f"{place}.{key}")
            else:
                there = ", ".join(map(str, got)) or "nothing"
                yield Difference(f"{place}.{key}", shown(value), f"no such field, only {there}")
    elif isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        for index, (wanted, each) in enumerate(zip(expected, got, strict=True)):
            yield from unlike(wanted, each, f"{place}[{index}]")
    elif not _same(expected, got):
        yield Difference(place, shown(expected), shown(got))


def _same(expected: Any, got: Any) -> bool:
    """`true` is not 1, whatever Python thinks of it."""
    if isinstance(expected, bool) or isinstance(got, bool):
        return expected is got
    return bool(expected == got)


def shown(value: Any) -> str:
    text = msgspec.json.encode(value, enc_hook=str).decode()
    return text if len(text) <= _SHOWN_CHARS_MAX else f"{text[:_SHOWN_CHARS_MAX]}..."


def _arrows(path: list[str]) -> str:
    return " -> ".join(path) if path else "nothing"
