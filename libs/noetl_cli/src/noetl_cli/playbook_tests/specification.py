"""The test file: YAML to tests, or every problem with its line.

playbook: hello.yaml
tests:
  - name: a short name
    payload: {name: Ada}
    mocks: {greet: {greeting: "Hello, Ada!", length: 11}}
    expect: {path: [greet, short_greeting]}
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec

from noetl_cli.playbook_tests.mocks import CLAIM, SINK, Answer, Frames, Mocks, Script
from noetl_core.domain.errors import PlaybookInvalidError, Problem, ToolError
from noetl_core.domain.playbook import Playbook
from noetl_core.domain.reader import Fields, Report, suggestion
from noetl_core.domain.yaml_tree import Mapping, Node, Scalar, Sequence, data_of, read_tree

_TEST_KEYS = ("name", "payload", "mocks", "signals", "expect")
_EXPECT_KEYS = (
    *("status", "path", "visited", "not_visited", "ctx", "results", "calls", "inputs", "config"),
    "error",
)
_ANSWER_KEYS = frozenset({"when", "result", "error", "chunks"})
_ERROR_KEYS = ("kind", "message", "code", "retryable", "details")
_BY_STEP = ("results", "calls", "inputs", "config")


class SignalGiven(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    approved: bool = True
    by: str = ""
    data: Any = None


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """None and empty: nothing is expected of it."""

    status: Literal["COMPLETED", "FAILED", "CANCELLED"] = "COMPLETED"
    path: list[str] | None = None
    visited: list[str] = []
    not_visited: list[str] = []
    ctx: dict[str, Any] = {}
    results: dict[str, Any] = {}
    calls: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    config: dict[str, Any] = {}
    error: dict[str, Any] = {}


class PlaybookTest(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    payload: dict[str, Any]
    mocks: Callable[[], Mocks]
    """Made anew for each run: they count their calls."""
    signals: list[SignalGiven]
    expected: Expected


class TestFile(msgspec.Struct, frozen=True, kw_only=True):
    __test__ = False  # for pytest, which goes by the name

    playbook: Playbook
    tests: list[PlaybookTest]


def read_test_file(text: str, *, file: str, load: Callable[[str], Playbook]) -> TestFile:
    """`load` gives the playbook of that path. Raises PlaybookInvalidError for what is wrong here,
    and whatever `load` raises."""
    tree, problems = read_tree(text, file=file)
    report = Report(problems)
    fields = Fields(report, tree, what="a test file", known=("playbook", "tests"))
    path = fields.required_text("playbook")
    nodes = fields.items("tests")
    if not nodes:
        fields.missing("tests")
    _stop(report, file)
    playbook = load(path)
    reader = _Reader(report, playbook)
    tests = [reader.test(node) for node in nodes]
    _stop(report, file)
    return TestFile(playbook=playbook, tests=tests)


def _stop(report: Report, file: str) -> None:
    if report.problems:
        ordered: list[Problem] = sorted(report.problems, key=lambda p: (p.line, p.column))
        raise PlaybookInvalidError(ordered, file=file)


class _Reader:
    def __init__(self, report: Report, playbook: Playbook) -> None:
        self._report = report
        self._playbook = playbook
        self._names = {*playbook.steps} | {
            f"{name}.{label}"
            for name, step in playbook.steps.items()
            for label in [*(task.label for task in step.tool), *([SINK] if step.sink else [])]
        }

    def test(self, node: Node) -> PlaybookTest:
        fields = Fields(self._report, node, what="a test", known=_TEST_KEYS)
        mocks = self._mocks(fields)
        return PlaybookTest(
            name=fields.required_text("name"),
            payload=fields.data("payload"),
            mocks=mocks,
            signals=[self._signal(each) for each in fields.items("signals")],
            expected=self._expected(fields),
        )

    def _signal(self, node: Node) -> SignalGiven:
        fields = Fields(
            self._report, node, what="a signal", known=("name", "approved", "by", "data")
        )
        data = fields.get("data")
        return SignalGiven(
            name=fields.required_text("name"),
            approved=fields.flag("approved", default=True),
            by=fields.text("by"),
            data=None if data is None else data_of(data),
        )

    def _mocks(self, test: Fields) -> Callable[[], Mocks]:
        test.data("mocks")
        node = test.get("mocks")
        scripts: dict[str, tuple[tuple[Answer, ...], bool]] = {}
        claims: dict[str, list[list[Any]]] = {}
        for name, given in node.items.items() if isinstance(node, Mapping) else ():
            assert isinstance(node, Mapping), node
            if self._is_claim(name):
                claims[name.removesuffix(f".{CLAIM}")] = self._frames(given)
            elif self._is_known(name, node.keys[name]):
                is_list = isinstance(given, Sequence)
                nodes = given.items if isinstance(given, Sequence) else [given]
                if not nodes:
                    self._report.add(given, f"`{name}` has no answer in its list", key=name)
                answers = tuple(self._answer(each, in_list=is_list) for each in nodes)
                scripts[name] = (answers, is_list)
        return lambda: Mocks(
            scripts={
                name: Script(name, answers, is_list=is_list)
                for name, (answers, is_list) in scripts.items()
            },
            claims={name: Frames(frames) for name, frames in claims.items()},
        )

    def _is_claim(self, name: str) -> bool:
        step = self._playbook.steps.get(name.removesuffix(f".{CLAIM}"))  # type: ignore[call-overload]
        is_cursor = step is not None and step.loop is not None and step.loop.cursor is not None
        return is_cursor and name.endswith(f".{CLAIM}")

    def _frames(self, node: Node) -> list[list[Any]]:
        frames = data_of(node)
        if isinstance(frames, list) and all(isinstance(frame, list) for frame in frames):
            return frames
        self._report.add(node, "the claims of a cursor are a list of lists of rows", key=CLAIM)
        return []

    def _answer(self, node: Node, *, in_list: bool) -> Answer:
        """A mapping that has `result`, `error` or `chunks`, and nothing else that it could not
        have, says more than a result; anything else is the result."""
        keys = frozenset(node.items) if isinstance(node, Mapping) else frozenset()
        if keys == {"attempts"} and in_list:
            attempts = Fields(self._report, node, what="an answer", known=("attempts",))
            answers = (self._answer(each, in_list=False) for each in attempts.items("attempts"))
            return Answer(attempts=tuple(answers))
        if not keys <= _ANSWER_KEYS or not keys & {"result", "error", "chunks"}:
            return Answer(result=data_of(node))
        fields = Fields(self._report, node, what="an answer", known=_ANSWER_KEYS)
        if {"result", "error"} <= keys:
            self._report.add(node, "an answer has `result` or `error`", key="error")
        result = fields.get("result")
        return Answer(
            result=None if result is None else data_of(result),
            error=self._error(fields) if "error" in keys else None,
            when=fields.text("when") or None,
            chunks=tuple(data_of(each) for each in fields.items("chunks")),
        )

    def _error(self, answer: Fields) -> ToolError:
        fields = answer.section("error", known=_ERROR_KEYS)
        return ToolError(
            kind=fields.required_text("kind"),
            message=fields.text("message", "the test says so"),
            code=fields.text("code"),
            retryable=fields.flag("retryable", default=False),
            details=fields.data("details"),
        )

    def _expected(self, test: Fields) -> Expected:
        fields = test.section("expect", known=_EXPECT_KEYS)
        error = fields.data("error")
        if error:
            fields.section("error", known=_ERROR_KEYS)
        path = self._steps(fields, "path") if fields.has("path") else None
        by_step = {name: self._by_step(fields, name) for name in _BY_STEP}
        return Expected(
            status=fields.choice("status", "FAILED" if error else "COMPLETED", Expected),
            path=path,
            visited=self._steps(fields, "visited"),
            not_visited=self._steps(fields, "not_visited"),
            ctx=fields.data("ctx"),
            error=error,
            **by_step,
        )

    def _steps(self, fields: Fields, name: str) -> list[str]:
        nodes = fields.items(name)
        for node in nodes:
            step = node.text if isinstance(node, Scalar) else ""
            self._is_known(step, node, self._playbook.steps)
        return [node.text for node in nodes if isinstance(node, Scalar)]

    def _by_step(self, fields: Fields, name: str) -> dict[str, Any]:
        values = fields.data(name)
        node = fields.get(name)
        for key, value in values.items() if isinstance(node, Mapping) else ():
            assert isinstance(node, Mapping), node
            known = self._playbook.steps if name == "results" else self._names
            self._is_known(key, node.keys[key], known)
            if name == "calls" and (not isinstance(value, int) or isinstance(value, bool)):
                self._report.add(node.items[key], "say how many calls: a number", key=key)
        return values

    def _is_known(self, name: str, node: Node, known: Iterable[str] | None = None) -> bool:
        names = self._names if known is None else known
        if name in set(names):
            return True
        hint = suggestion(name, names)
        self._report.add(node, f"the playbook has no step `{name}`", key=name, hint=hint)
        return False
