"""Files to outcomes: every test of every file, each in an execution of its own."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from noetl_cli.failure import EXIT_USAGE, CommandFailed
from noetl_cli.playbook_tests.dry_run import DryRun
from noetl_cli.playbook_tests.expectations import Difference, differences
from noetl_cli.playbook_tests.mocks import TestFailedError
from noetl_cli.playbook_tests.skipping_loop import run_without_waiting
from noetl_cli.playbook_tests.specification import PlaybookTest, TestFile, read_test_file
from noetl_cli.validation import parse_file, read_text
from noetl_core.domain.errors import PlaybookInvalidError
from noetl_core.domain.parse import format_problem
from noetl_core.domain.playbook import Playbook

FILE_PATTERN = "*.test.yaml"


class Outcome(NamedTuple):
    """How one test went. `differences` is empty when it passed."""

    file: str
    name: str
    differences: list[Difference]
    path: list[str]

    @property
    def is_passed(self) -> bool:
        return not self.differences

    def as_json(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "name": self.name,
            "passed": self.is_passed,
            "differences": [each.as_json() for each in self.differences],
            "path": self.path,
        }


def find_test_files(named: Iterable[Path]) -> list[Path]:
    """The files, and of a folder every test file in it. Ends the command where there is none."""
    found: list[Path] = []
    for path in named:
        inside = sorted(path.rglob(FILE_PATTERN)) if path.is_dir() else [path]
        if not inside:
            raise CommandFailed(
                f"{path} has no test: a test file is called {FILE_PATTERN}.", exit_code=EXIT_USAGE
            )
        found.extend(inside)
    return found


def read_tests(file: Path) -> TestFile:
    """Ends the command with every problem of a test file, or of the playbook that it tests."""
    text = read_text(file)

    def load(path: str) -> Playbook:
        return parse_file(file.parent / path).playbook

    try:
        return read_test_file(text, file=str(file), load=load)
    except PlaybookInvalidError as error:
        lines = [format_problem(problem, str(file), text) for problem in error.problems]
        raise CommandFailed("\n".join(lines), exit_code=EXIT_USAGE) from error


def outcomes_of(file: Path, tests: TestFile) -> Iterator[Outcome]:
    for test in tests.tests:
        yield run_without_waiting(_run(file, tests.playbook, test))


async def _run(file: Path, playbook: Playbook, test: PlaybookTest) -> Outcome:
    run = DryRun(playbook, test.mocks())
    try:
        await run.run(test.payload, test.signals)
    except TestFailedError as failed:
        found = [Difference(str(failed))]
    else:
        found = list(differences(test.expected, run))
    return Outcome(str(file), test.name, found, run.path)
