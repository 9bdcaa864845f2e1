"""What tools answer in a test instead of being called."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from noetl_core.domain.errors import ToolError

CLAIM = "claim"
SINK = "sink"

Holds = Callable[[str], Awaitable[bool]]
"""Whether a guard holds for the call that is made."""


class TestFailedError(Exception):
    """The execution cannot go on as the test describes it; the message says what to write."""

    __test__ = False


class Answer(NamedTuple):
    """What one call gives. `attempts`: by attempt, for an item of a loop."""

    result: Any = None
    error: ToolError | None = None
    when: str | None = None
    chunks: tuple[Any, ...] = ()
    attempts: "tuple[Answer, ...]" = ()


class Script:
    """The answers of one mock, and how many of them were given.

    One answer is given to every call. Of a list the n-th goes to the n-th item of a loop, elsewhere
    to the n-th call; if any of them has a guard, each call gets the first one whose guard holds.
    """

    def __init__(self, name: str, answers: tuple[Answer, ...], *, is_list: bool) -> None:
        self._name = name
        self._answers = answers
        self._is_list = is_list
        self._is_guarded = any(answer.when is not None for answer in answers)
        self._calls: Counter[int | None] = Counter()

    async def next(self, index: int | None, holds: Holds) -> Answer:
        """Raises TestFailedError when there is none for this call."""
        number = self._calls[index]
        self._calls[index] += 1
        if self._is_guarded:
            return await self._guarded(holds)
        if not self._is_list:
            answer = self._answers[0]
        else:
            answer = self._at(self._answers, number if index is None else index, "call", index)
        if answer.attempts:
            return self._at(answer.attempts, number, "attempt", index)
        return answer

    async def _guarded(self, holds: Holds) -> Answer:
        for answer in self._answers:
            if answer.when is None or await holds(answer.when):
                return answer
        raise TestFailedError(f"no `when` of `mocks.{self._name}` holds for the call that is made")

    def _at(self, answers: tuple[Answer, ...], number: int, what: str, index: int | None) -> Answer:
        if number < len(answers):
            return answers[number]
        of_item = "" if index is None else f" of item {index}"
        which = f"item {index}" if what == "call" and index is not None else f"{what} {number + 1}"
        suffix = of_item if what == "attempt" else ""
        raise TestFailedError(
            f"`mocks.{self._name}` has {len(answers)} answers, and there is none for "
            f"{which}{suffix}"
        )


class Frames:
    """What the claims of a cursor loop find, one after the other; then nothing more."""

    def __init__(self, frames: list[list[Any]]) -> None:
        self._frames = iter(frames)

    def next(self) -> list[Any]:
        return next(self._frames, [])


class Mocks(NamedTuple):
    """By `step`, or by `step.task` for one task of it."""

    scripts: Mapping[str, Script]
    claims: Mapping[str, Frames]

    def of_task(self, step: str, label: str) -> Script | None:
        return self.scripts.get(f"{step}.{label}")

    def of_step(self, step: str) -> Script | None:
        return self.scripts.get(step)
